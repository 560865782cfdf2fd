"""The outcome of a repetition: the times of a cell, or the reason for having none."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from profiler.facts.fact import Fact, MergedFacts
from profiler.facts.telemetry import HardwareCounters
from profiler.grid.cells import PHASES, Cell, CellKey, Phase
from profiler.stats import RepetitionSpread, spread_of

Status = Literal["ok", "oom", "skipped", "failed", "forecast"]


@dataclass(frozen=True, slots=True)
class Repetition(Fact, kind="visit"):
    """One measurement of a cell: a prefill and the decode loop after it."""

    cell: Cell
    round: int
    prefill_s: float | None
    """None if the cache was filled directly."""
    decode_s: tuple[float, ...]
    """Seconds of each decode step. Readers leave out the first one, which pays for the first growth of the cache. Of
    an engine that owns its model these are means over whole loops; the first loop's is also in place of that step."""
    wall_s: float
    """Host seconds of prefill and loop together, synchronised at both ends."""
    warm_up_s: tuple[float, ...]
    peak_memory_bytes: int | None
    """The allocator's peak (CUDA) or the process's (CPU)."""
    at_unix_s: float
    ttft_s: float | None = None
    """Time to first token of a user: prompt ids to the device, prefill, and the token back to the host."""
    more_prefill_s: tuple[float, ...] = ()
    """Seconds of further prefills of the same repetition, without a loop."""
    more_ttft_s: tuple[float, ...] = ()
    """Their times to first token; empty in older runs."""
    loop_s: float | None = None
    """Host seconds of the decode loop, synchronised at both ends."""
    issue_s: float | None = None
    """Seconds until the host had submitted the whole decode loop; on a CPU the loop itself."""
    preparation_s: float = 0.0
    """Seconds of the engine to prepare this shape: compilation, capture."""
    device_memory_bytes: int | None = None
    """Memory of the device in use by all processes after the repetition (CUDA)."""
    foreign_cores: float | None = None
    """Number of this process's cores that others kept busy; None if the repetition was too short to measure it."""
    energy_j: float | None = None
    """Joules of the device for prefill and loop together; None without a counter."""
    prefill_faults: int = 0
    decode_faults: int = 0
    """Pages that the process touched for the first time in the prefill, and in the whole loop after it."""
    first_decode_s: tuple[float, ...] = ()
    """Decode steps of the first, untimed loop of this shape in the process (CUDA)."""
    decode_counters: HardwareCounters | None = None
    """The GPU's own counters of such a loop, as means over the timed one; older ones also saw 0.1 s before it."""

    def merge_into(self, merged: MergedFacts) -> None:
        merged.repetitions.setdefault(self.cell, []).append(self)
        merged.gaps.pop(self.cell, None)  # a resumed run tries the cell again

    @property
    def prefills_s(self) -> tuple[float, ...]:
        return () if self.prefill_s is None else (*self.more_prefill_s, self.prefill_s)

    @property
    def ttfts_s(self) -> tuple[float, ...]:
        return self.more_ttft_s if self.ttft_s is None else (*self.more_ttft_s, self.ttft_s)

    def spans(self, phase: Phase) -> list[tuple[float, float]]:
        """Return when a phase ran, as (unix time of its start, seconds): the loop, or prefills before and after it."""
        end_unix_s = self.at_unix_s + self.wall_s
        if phase == "decode":
            loop_s = self.wall_s - (self.prefill_s or 0.0) if self.loop_s is None else self.loop_s
            return [(end_unix_s - loop_s, loop_s)]
        first_s = self.ttft_s or self.prefill_s or 0.0
        return [(self.at_unix_s, first_s), (end_unix_s, sum(self.more_prefill_s))] if first_s else []


@dataclass(frozen=True)
class Gap(Fact, kind="gap", into="gaps"):
    """A cell without a time, and the reason."""

    cell: Cell
    status: Status
    reason: str


def foreign_cores(repetitions: Sequence[Repetition]) -> float | None:
    """Return the mean number of cores that others kept busy during the repetitions; None if none measured it."""
    watched = [(each.foreign_cores, each.wall_s) for each in repetitions if each.foreign_cores is not None]
    total_s = sum(wall_s for _, wall_s in watched)
    return sum(cores * wall_s for cores, wall_s in watched) / total_s if total_s else None


def repetition_spreads(
    keys: Iterable[CellKey], repetitions: Mapping[Cell, Sequence[Repetition]], swing: float
) -> dict[Phase, RepetitionSpread]:
    """Return the spread between repetitions of one cell, by phase, from the `keys`; `swing` is the drift probe's."""
    medians: dict[Phase, list[dict[int, float]]] = {phase: [] for phase in PHASES}
    for key in keys:
        medians[key.phase].append(phase_medians(key.phase, repetitions[key.cell]))
    return {phase: spread_of(of_cells, swing) for phase, of_cells in medians.items()}


def phase_samples(phase: Phase, repetitions: Sequence[Repetition]) -> list[tuple[float, ...]]:
    """Return the samples of a phase, one tuple per repetition: its prefills if any, or its steps after the first."""
    if phase == "prefill":
        return [repetition.prefills_s for repetition in repetitions if repetition.prefills_s]
    return [repetition.decode_s[1:] for repetition in repetitions]


def first_use_s(repetitions: Sequence[Repetition]) -> float | None:
    """Return the seconds of a decode step at a KV length that is new to the process, from the first loop of a shape.

    cuDNN has one attention plan for each exact shape (PyTorch, aten/src/ATen/native/cudnn/MHA.cpp). None if such steps
    take less than twice as long as later ones, or if no first loop was recorded.
    """
    first = [seconds for repetition in repetitions for seconds in repetition.first_decode_s[1:]]
    later = [seconds for repetition in repetitions for seconds in repetition.decode_s[1:]]
    if not first or not later or statistics.median(first) < 2 * statistics.median(later):
        return None
    return statistics.median(first)


def median_issue_s(repetitions: Sequence[Repetition]) -> float | None:
    """Return the median seconds until the host has submitted a decode step; None if not measured."""
    issued = [each.issue_s / len(each.decode_s) for each in repetitions if each.issue_s is not None]
    return statistics.median(issued) if issued else None


def phase_medians(phase: Phase, repetitions: Sequence[Repetition]) -> dict[int, float]:
    """Return the median time of a phase by round."""
    return {
        repetition.round: statistics.median(samples)
        for repetition in repetitions
        for samples in phase_samples(phase, [repetition])
        if samples
    }
