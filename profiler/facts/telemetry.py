"""Readings of clocks, power, temperature and throttling, their summary, and other processes that kept cores busy."""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from profiler.facts.fact import Fact
from profiler.grid.cells import Phase
from profiler.units import several

POWER_CAP = "power cap"
# Reasons for low clocks (nvml.h, nvmlClocksEventReason*). 1 (idle) and 2 (application clocks) are not faults.
THROTTLE_BITS = {
    0x4: POWER_CAP,
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
_CLOCK_DROP = 0.05
_BUSY_NEIGHBOUR_CORES = 0.3
# NVML's utilisation covers the last 1/6 to 1 second (nvml.h, nvmlUtilization_t), and its power up to a second.
_AVERAGED_S = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One telemetry reading of a device; None for what it does not report."""

    clock_hz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: int | None = None
    sm_active: float | None = None
    memory_active: float | None = None
    """Shares of the time in which any SM, or the memory, was active at all; not shares of their peak rates."""
    throttle: tuple[str, ...] | None = None
    """Reasons for throttling; empty if there is none."""
    other_processes: int | None = None
    """Number of other processes that compute on the card."""
    busy_cores_elsewhere: float | None = None
    """How many of this process's cores others kept busy."""
    at_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HardwareCounters:
    """What the GPU's own counters say of an interval: means over it, as shares of 1 (nvml.h, nvmlGpmMetricId_t)."""

    sm: float
    """Share of the SMs that were busy (NVML_GPM_METRIC_SM_UTIL)."""
    tensor: float
    """Share of the time in which the SMs ran tensor operations (NVML_GPM_METRIC_ANY_TENSOR_UTIL)."""
    dram: float
    """Memory bandwidth in use over the theoretical maximum (NVML_GPM_METRIC_DRAM_BW_UTIL)."""


@dataclass(frozen=True)
class ActiveShares:
    """Shares of the time in which any SM, or the memory, was active at all; None if the device does not report it."""

    sm: float | None
    memory: float | None
    clock_hz: float | None = None


@dataclass(frozen=True)
class ReadingRange:
    """Minimum, median and maximum of some readings."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class TelemetrySummary:
    """Statistics of a run's readings; None for what the device does not report."""

    readings: int
    clock_hz: ReadingRange | None
    power_w: ReadingRange | None
    sm_active: ReadingRange | None
    memory_active: ReadingRange | None
    temperature_c: ReadingRange | None
    busy_cores_elsewhere: ReadingRange | None
    other_processes: int | None
    throttle: tuple[str, ...] | None


class Timeline:
    """Readings in order of time, for queries by (start, seconds) spans."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._readings = sorted(readings, key=lambda reading: reading.at_unix_s)
        self._at_unix_s = [reading.at_unix_s for reading in self._readings]

    def throttled(self, spans: Sequence[tuple[float, float]], phase: Phase) -> tuple[str, ...]:
        """Return the throttle reasons within the (start, seconds) spans of a phase, in alphabetical order.

        Power is averaged over up to a second, so its limit may be reported for the time before. In a decode loop, after
        a prefill, it counts only from the second second on. Before a prefill there is no load.
        """
        reasons = {name for reading in self._during(spans) for name in reading.throttle or ()}
        if phase == "decode":
            later = self._during([(start + _AVERAGED_S, seconds - _AVERAGED_S) for start, seconds in spans])
            reasons -= {POWER_CAP} - {name for reading in later for name in reading.throttle or ()}
        return tuple(sorted(reasons))

    def active(self, spans: Sequence[tuple[float, float]]) -> ActiveShares:
        """Return medians of the readings within the (start, seconds) spans.

        A share describes the time before its reading, so those of the first second of a span are left out.
        """
        settled = self._during([(start + _AVERAGED_S, seconds - _AVERAGED_S) for start, seconds in spans])
        sm = [r.sm_active for r in settled if r.sm_active is not None]
        memory = [r.memory_active for r in settled if r.memory_active is not None]
        clocks = [r.clock_hz for r in self._during(spans) if r.clock_hz is not None]
        return ActiveShares(_middle(sm), _middle(memory), _middle(clocks))

    def _during(self, spans: Sequence[tuple[float, float]]) -> list[Reading]:
        """Readings within the spans, each once, even if spans overlap because a clock was set back."""
        readings: list[Reading] = []
        end = 0
        for start_s, end_s in sorted((start, start + seconds) for start, seconds in spans if seconds >= 0):
            first = max(end, bisect_left(self._at_unix_s, start_s))
            end = max(end, bisect_right(self._at_unix_s, end_s))
            readings += self._readings[first:end]
        return readings


def _middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def health(readings: Sequence[Reading]) -> TelemetrySummary:
    """Return medians and extremes of the readings, and all throttle reasons."""
    others = [r.other_processes for r in readings if r.other_processes is not None]
    throttles = [r.throttle for r in readings if r.throttle is not None]
    ranged = ("clock_hz", "power_w", "sm_active", "memory_active", "temperature_c", "busy_cores_elsewhere")
    return TelemetrySummary(
        readings=len(readings),
        **{name: _spread([getattr(r, name) for r in readings]) for name in ranged},
        other_processes=max(others, default=None),
        throttle=tuple(sorted({reason for reasons in throttles for reason in reasons})) if throttles else None,
    )


def complaints(readings: Sequence[Reading], *, of_cores: bool = True) -> list[str]:
    """Return a sentence per disturbance in the readings, each with its figure; busy cores only if `of_cores`."""
    sentences = []
    if shared := max((r.other_processes or 0 for r in readings), default=0):
        sentences.append(f"{shared} other processes computed on this GPU: times may be too long.")
    elsewhere = _spread([r.busy_cores_elsewhere for r in readings])
    if of_cores and elsewhere and elsewhere.median > _BUSY_NEIGHBOUR_CORES:
        sentences.append(f"other processes kept {elsewhere.median:.1f} cores busy: times may be too long.")
    throttles = [r.throttle for r in readings if r.throttle is not None]
    for reason in THROTTLE_BITS.values():
        share = sum(reason in reasons for reasons in throttles) / len(throttles) if throttles else 0.0
        if share > 0:
            sentences.append(f"the GPU was throttled ({reason}) in {100 * share:.0f} % of the readings.")
    clocks = [r.clock_hz for r in readings if r.clock_hz]
    if len(clocks) >= 4 and clocks[-1] < (1 - _CLOCK_DROP) * clocks[0]:
        sentences.append(f"the clock fell from {clocks[0] / 1e6:.0f} to {clocks[-1] / 1e6:.0f} MHz during the run.")
    return sentences


def _spread(values: Sequence[float | None]) -> ReadingRange | None:
    numbers = sorted(value for value in values if value is not None)
    return ReadingRange(numbers[0], numbers[len(numbers) // 2], numbers[-1]) if numbers else None


# As much of one core goes to the system's own work on an idle machine.
_SYSTEM_CORES = 0.25
# Processes that keep at least this share of the busy cores explain them.
_EXPLAINED = 0.5


@dataclass(frozen=True, slots=True)
class BusyProcess:
    name: str
    pid: int
    cores: float

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


@dataclass(frozen=True)
class Contention(Fact, kind="contention"):
    """Cores that other processes kept busy over some time."""

    cores: float
    of_cores: int
    """The cores that this process may run on."""
    processes: tuple[BusyProcess, ...] = ()
    """The busiest of them; empty where they cannot be seen, as in another container or virtual machine."""
    at_unix_s: float = 0.0

    def disturbs(self, threads: int) -> bool:
        """Whether others leave fewer cores than `threads`."""
        return self.cores + threads > self.of_cores + _SYSTEM_CORES

    @property
    def busy_cores(self) -> str:
        """Such as `1.0 of 2 cores`."""
        return f"{self.cores:.1f} of {several(self.of_cores, 'core', 'cores')}"

    @property
    def who(self) -> str:
        """The processes by name, or a word for those that cannot be seen."""
        if not self.processes or sum(process.cores for process in self.processes) < _EXPLAINED * self.cores:
            return "other work (not visible from here)"
        *others, last = map(str, self.processes)
        return f"{', '.join(others)} and {last}" if others else last
