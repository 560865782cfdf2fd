"""Measured ceilings as values: compute, memory, launch, links, and the readings of the drift probe."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from profiler.data.ceiling_set import CeilingSet
from profiler.data.datasheets import Datasheet
from profiler.data.links import Link
from profiler.facts.fact import Fact
from profiler.stats import NOTCH

TFLOAT32 = "tfloat32"
GEMV = "gemv"
READ = "read"
COPY = "copy"
TRIAD = "triad"
DATASHEET = "datasheet"
"""The method of a ceiling that was not measured: the dense peak of the card's datasheet, which no kernel reaches."""
PINNED = "host, pinned"
"""The link from pinned memory; weights cross the link from ordinary memory, `host`."""
RESIDENT_GAIN = 1.25
"""A buffer that is repeatedly read this many times as fast as memory is served by a cache."""
AGREE = 0.05
"""Two measurements of one ceiling agree within this share; on a quiet machine they differ by at most 3 %."""


@dataclass(frozen=True)
class Ceiling:
    """One measured ceiling, in units per second."""

    per_s: float
    """The median of the samples."""
    low_per_s: float
    """Lower quartile of the samples."""
    high_per_s: float
    """Upper quartile of the samples."""
    samples: int
    """Number of samples; 0 for a datasheet's peak."""
    method: str
    """How it was measured."""
    clock_hz: float | None = None
    """The device's median clock during the measurement; None if the device does not report it."""
    seconds: tuple[float, ...] = ()
    """All samples; empty if only their statistics were stored."""
    burst_per_s: float | None = None
    """A compute ceiling in its first 20 ms, before a GPU reaches its power limit; None in older runs and on a CPU."""

    @property
    def measured(self) -> bool:
        """Whether the ceiling was measured; a datasheet's peak has no samples."""
        return self.samples > 0

    @property
    def half_width(self) -> float:
        """Half-width of the median's interval as a share of it (see `stats.timing_of`); 0 without samples."""
        if not self.measured:
            return 0.0
        return NOTCH * (self.high_per_s - self.low_per_s) / self.per_s / math.sqrt(self.samples)

    @property
    def at_full_clock(self) -> float:
        """A compute ceiling before the device reached its power limit, as a multiple of it.

        An H100 of 700 W reaches 780 TFLOP/s in bfloat16 for a moment, and 700 at its power limit. In older runs the
        fastest sample stands for the burst.
        """
        fastest = statistics.median(self.seconds) / min(self.seconds) if self.seconds else 1.0
        return max(1.0, self.burst_per_s / self.per_s) if self.burst_per_s else fastest

    def times(self, share: float) -> Ceiling:
        """Return this ceiling scaled by `share`, without its samples."""
        per_s, low, high = (share * value for value in (self.per_s, self.low_per_s, self.high_per_s))
        burst_per_s = share * self.burst_per_s if self.burst_per_s else None
        return replace(self, per_s=per_s, low_per_s=low, high_per_s=high, seconds=(), burst_per_s=burst_per_s)


def _nominal_ceiling(per_s: float, method: str) -> Ceiling:
    return Ceiling(per_s, per_s, per_s, 0, method)


_NO_CEILING = _nominal_ceiling(math.inf, "none")


@dataclass(frozen=True)
class CurvePoint:
    """The bandwidth of repeatedly reading one buffer of this size."""

    nbytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class DriftReading(Fact, kind="sentinel", into="drift_readings"):
    """One reading of the drift probe: seconds of its memory-bound and its compute-bound work."""

    memory: float
    compute: float
    at_unix_s: float = 0.0
    clock_hz: float | None = None
    """The GPU's clock right after; None in older runs, on a CPU, and where the device does not report it."""


REFERENCE_HOST = "AMD EPYC (Zen 4, 2.6 GHz)"
REFERENCE_HOST_STEP_S = 7.2e-3
"""Seconds of a step of `measure_host_pace` on the reference host (lscpu: `AMD EPYC`, family 25, model 17).

It is a virtual machine of two cores at 2.6 GHz with Python 3.11.7, torch 2.13.0 and transformers 5.23.0. The machine
was shared and busy; the value is the fastest quartile of twelve measurements of 7.0 to 13 ms within half an hour."""


@dataclass(frozen=True)
class HostPace:
    """Speed of one host core at launching, by steps of the standard overhead model."""

    step_s: float
    """CPU seconds per step: the fastest quartile of `seconds`."""
    seconds: tuple[float, ...] = ()
    """Seconds per step of each series; empty if only `step_s` was stored."""

    @property
    def index(self) -> float:
        """Time of a step relative to the reference host; above 1 is slower."""
        return self.step_s / REFERENCE_HOST_STEP_S


@dataclass(frozen=True)
class WeightReadCeiling:
    """Bandwidth of reading the model's weights in place, as its steps do, instead of a contiguous buffer."""

    nbytes: int
    """Bytes of the tensors that were read."""
    ceiling: Ceiling
    stream: Ceiling | None = None
    """A contiguous buffer in pieces of the same sizes, read alternately with the weights; None in older runs."""


@dataclass(frozen=True)
class CeilingsRemeasured(Fact, kind="roofs_again", into="remeasured_ceilings"):
    """The ceilings that a verdict depends on, measured again at the end of the run."""

    memory: Mapping[str, Ceiling]
    """Bytes/s of a stream read, and of the matrix-vector product."""
    compute: Mapping[str, Ceiling]
    """FLOP/s of the matmul in the model's dtype."""
    at_unix_s: float = 0.0


@dataclass(frozen=True)
class MeasuredCeilings:
    """The best rates of the device: what a run measured, and what its run.json has of it."""

    compute: Mapping[str, Ceiling]
    """FLOP/s of a large matmul, by dtype name."""
    memory: Mapping[str, Ceiling]
    """Bytes/s by kind: read, copy, triad, and the matrix-vector product in the model's dtype."""
    stream_bytes: int
    """Size of the streamed buffers."""
    beyond_cache: bool
    """Whether no cache served the buffers, by their size (four times the reported caches) or by their bandwidth."""
    curve: tuple[CurvePoint, ...] = ()
    """Read bandwidth by buffer size, up to the streamed buffers; caches show as steps."""
    launch: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the host to submit one tiny kernel, and of the device to run it (by graph replay)."""
    page_fault_s: float = 0.0
    """Seconds of the first access to a new page (CPU); 0 if not measured."""
    links: Mapping[str, Ceiling] = field(default_factory=dict)
    """Bytes/s from the `host` or the `disk` to the device; measured only where weights of this model are offloaded."""
    collective: Link | None = None
    """The link between the ranks that share the model; None with one device."""
    host: HostPace | None = None
    """Speed of a host core at launching kernels; None if not measured."""
    measured_s: float = 0.0
    """Seconds that the measurement took."""
    measured_at_unix_s: float = 0.0
    weights: WeightReadCeiling | None = None
    """Bandwidth of reading this model's weights; None if they are too small or were not read."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """The reason, in one line, for each ceiling that could not be measured, by name."""


@dataclass(frozen=True)
class Ceilings(MeasuredCeilings, Fact, kind="roofs"):
    """The best rates of the device, as measured in this run."""

    @property
    def judges(self) -> bool:
        """Whether there is a ceiling of memory and one of compute; a time breakdown needs both."""
        return bool(self.memory) and bool(self.compute)

    def measured(self, dtype: str) -> bool:
        """Return whether both ceilings of a step in this dtype were measured on the device."""
        return self.memory_ceiling.measured and dtype in self.compute and self.compute[dtype].measured

    def fetch_s(self, waiting_bytes: Mapping[str, int]) -> float:
        """Return the seconds to transfer offloaded bytes, given by location; bytes of unmeasured links do not count."""
        return sum(nbytes / self.links[where].per_s for where, nbytes in waiting_bytes.items() if where in self.links)

    def ceiling_set(self, device: str) -> CeilingSet:
        peaks = {dtype: ceiling.per_s for dtype, ceiling in self.compute.items()}
        return CeilingSet(f"{device}, measured", self.memory_bytes_per_s, peaks)

    @property
    def plateau(self) -> bool:
        """Whether the two largest sizes are read equally fast; otherwise a cache still serves a part."""
        last = [point.bytes_per_s for point in self.curve[-2:]]
        return len(last) == 2 and agree(*last)

    @property
    def past_caches_bytes(self) -> int:
        """Size of a buffer that caches hardly serve when it is read repeatedly.

        It is twice the least size from which all buffers are read about as slowly as memory. A cache may still serve a
        fifth of that least size itself.
        """
        slow = takewhile(
            lambda point: point.bytes_per_s <= RESIDENT_GAIN * self.curve[-1].bytes_per_s, reversed(self.curve)
        )
        least = min((point.nbytes for point in slow), default=None)
        return 2 * least if least else self.stream_bytes

    @property
    def memory_bytes_per_s(self) -> float:
        """Bytes/s of that ceiling; infinite without one."""
        return self.memory_ceiling.per_s

    @property
    def memory_ceiling(self) -> Ceiling:
        """The memory ceiling beyond all caches: stream read, or matrix-vector product if faster."""
        return memory_ceiling(self.memory)

    def memory_bytes_per_s_for(self, working_set_bytes: Any) -> Any:
        """Return the bandwidth for working sets that are read repeatedly, a number or an array: a cache's, or memory's.

        A model that fits a cache is not bound by memory. The nearest larger size of the curve decides, by its speed
        relative to the end of the curve, since a shared machine may have changed between curve and ceiling.
        """
        gains = [max(1.0, point.bytes_per_s / self.curve[-1].bytes_per_s) for point in self.curve]
        larger = np.searchsorted([point.nbytes for point in self.curve], working_set_bytes)
        bandwidth = self.memory_bytes_per_s * np.array([*gains, 1.0])[larger]
        return bandwidth if np.ndim(bandwidth) else float(bandwidth)

    @property
    def copy_share(self) -> float:
        """Bandwidth of a copy (equal reads and writes) as a share of the memory ceiling; 1 if not measured."""
        copy = self.memory.get(COPY)
        return min(1.0, copy.per_s / self.memory_bytes_per_s) if copy else 1.0

    def cache_resident(self, working_set_bytes: float) -> bool:
        """Return whether a cache serves a working set: it is read clearly faster than memory."""
        return bool(self.memory_bytes_per_s_for(working_set_bytes) > RESIDENT_GAIN * self.memory_bytes_per_s)

    def out_of_the_cache(self, working_set_bytes: float) -> Ceilings:
        """Return these ceilings for a working set with the bandwidth of the next smaller size of the curve.

        This needs a cache that certainly ends between the two sizes around the working set. At least two larger sizes
        must be clearly slower, and the end of the curve not faster than the memory ceiling. Otherwise one of the
        figures was measured too low, and the ceilings stay as they are.
        """
        smaller = tuple(point for point in self.curve if point.nbytes < working_set_bytes)
        larger = self.curve[len(smaller) :]
        if not smaller or len(larger) < 2:
            return self
        beyond_per_s = max(point.bytes_per_s for point in larger)
        if smaller[-1].bytes_per_s <= RESIDENT_GAIN * beyond_per_s:
            return self
        if beyond_per_s > RESIDENT_GAIN * self.memory_bytes_per_s:
            return self
        served = CurvePoint(math.ceil(working_set_bytes), smaller[-1].bytes_per_s)
        return replace(self, curve=(*smaller, served, *larger))

    def only(self, dtypes: Sequence[str], model_dtype: str, sheet: Datasheet | None = None) -> Ceilings:
        """Return the ceilings of these dtypes, for a model whose weights have `model_dtype`.

        A ceiling that was not measured is the peak of `sheet`, if the card has one, or left out.
        """
        streams = {name: ceiling for name, ceiling in self.memory.items() if not name.startswith(GEMV)}
        gemv = self.memory.get(f"{GEMV} {model_dtype}")
        memory = {**streams, **({GEMV: gemv} if gemv else {})}
        compute = {name: self.compute[name] for name in dtypes if name in self.compute}
        if sheet is not None:
            peaks = {name: sheet.peak_flops_per_s(name) for name in dtypes if name not in compute}
            compute |= {name: _nominal_ceiling(peak, DATASHEET) for name, peak in peaks.items() if peak}
            memory = memory or {READ: _nominal_ceiling(sheet.bandwidth_bytes_per_s, DATASHEET)}
        return replace(self, compute=compute, memory=memory)

    def times(self, memory: float, compute: float) -> Ceilings:
        """Return these ceilings with memory (caches too) and compute scaled by these shares."""
        return replace(
            self,
            memory={name: ceiling.times(memory) for name, ceiling in self.memory.items()},
            curve=tuple(replace(point, bytes_per_s=memory * point.bytes_per_s) for point in self.curve),
            compute={name: ceiling.times(compute) for name, ceiling in self.compute.items()},
        )

    def compute_flops_per_s(self, dtype: str) -> float:
        """Return the FLOP/s of `compute_ceiling`; infinite without any."""
        return self.compute_ceiling(dtype).per_s

    def full_clock(self) -> dict[str, float]:
        """Return the FLOP/s at full clock by dtype, where they are clearly above the ceiling."""
        shares = {dtype: ceiling.at_full_clock for dtype, ceiling in self.compute.items()}
        return {dtype: share * self.compute[dtype].per_s for dtype, share in shares.items() if share > 1 + AGREE}

    def compute_ceiling(self, dtype: str) -> Ceiling:
        """Return the compute ceiling of a dtype; if unknown, the highest of the others."""
        return self.compute.get(dtype) or max(
            self.compute.values(), key=lambda ceiling: ceiling.per_s, default=_NO_CEILING
        )


def memory_ceiling(memory: Mapping[str, Ceiling]) -> Ceiling:
    """Return the memory ceiling of a decode step: stream read, or the matrix-vector product if faster.

    A step mainly reads. Copies and triads also write, and count only if there is no read.
    """
    reads = [ceiling for name, ceiling in memory.items() if name == READ or name.startswith(GEMV)]
    return max(reads or memory.values(), key=lambda ceiling: ceiling.per_s, default=_NO_CEILING)


def agree(one_per_s: float, other_per_s: float, half_widths: float = 0.0) -> bool:
    """Return whether two rates differ by at most AGREE, or by the sum of their half-widths (shares)."""
    return abs(one_per_s / other_per_s - 1) <= max(AGREE, half_widths)


def machine_times(drift_readings: Sequence[DriftReading], *, on_gpu: bool) -> list[list[float]]:
    """Return the drift probe's times of memory and of compute [readings each].

    A GPU's matmuls are in cycles, since its own work at the power limit lowers its clock; without clocks they are left
    out.
    """
    memory = [each.memory for each in drift_readings]
    if not on_gpu:
        return [memory, [each.compute for each in drift_readings]]
    cycles = [each.compute * each.clock_hz for each in drift_readings if each.clock_hz]
    return [memory, cycles] if len(cycles) == len(memory) else [memory]


def drift(drift_readings: Sequence[DriftReading], *, on_gpu: bool) -> float:
    """Return the change of the machine's speed from the first half of the readings to the second, as a share.

    Medians are compared, since a single reading may be disturbed. The larger change of memory and compute counts.
    """
    half = len(drift_readings) // 2
    if not half:
        return 0.0
    of_work = machine_times(drift_readings, on_gpu=on_gpu)
    return max(abs(statistics.median(times[half:]) / statistics.median(times[:half]) - 1) for times in of_work)


def swing(drift_readings: Sequence[DriftReading], *, on_gpu: bool) -> float:
    """Return the slowest reading of the machine over the fastest, minus 1; the larger of memory and compute."""
    of_work = machine_times(drift_readings, on_gpu=on_gpu)
    return max(max(times) / min(times) - 1 for times in of_work) if drift_readings else 0.0
