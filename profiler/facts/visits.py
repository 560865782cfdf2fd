"""The outcome of a visit: the times of a cell, or the reason why there are none."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from profiler.facts.fact import Fact
from profiler.facts.scheduler import Scheduled, prefill_iterations
from profiler.grid.cells import Cell, Phase

if TYPE_CHECKING:
    from profiler.facts.merged import MergedFacts


Status = Literal["ok", "oom", "skipped", "failed"]


@dataclass(frozen=True, slots=True)
class Visit(Fact, kind="visit"):
    """One visit of one cell: a prefill and the decode loop behind it, as they were measured."""

    cell: Cell
    round: int
    prefill_s: float | None
    """None where the cache was filled directly."""
    decode_s: tuple[float, ...]
    """Seconds of each decode step; the first one is kept apart by readers, since it pays for the first growth."""
    wall_s: float
    """The host's clock around prefill and loop together, with a synchronisation at both ends."""
    warm_up_s: tuple[float, ...]
    peak_memory_bytes: int | None
    """The allocator's peak (CUDA) or the process's (CPU)."""
    at_unix_s: float
    ttft_s: float | None = None
    """Time to first token as a user sees it: the prompt's ids to the device, prefill, the token back on the host."""
    more_prefill_s: tuple[float, ...] = ()
    """Further prefills of the same visit, which no loop followed."""
    loop_s: float | None = None
    """The host's clock around the decode loop alone, with a synchronisation at both ends."""
    issue_s: float | None = None
    """Seconds after which the host had submitted the whole decode loop; on a CPU the loop itself."""
    preparation_s: float = 0.0
    """Seconds that the engine needed before this shape could be timed: compiling, capturing."""
    device_memory_bytes: int | None = None
    """Memory of the device in use after the visit, by all its users (CUDA)."""
    foreign_cores: float | None = None
    """CPU cores of this process's set that others kept busy meanwhile; None where the visit is too short to tell."""
    energy_j: float | None = None
    """Joules that the device took for prefill and loop together, where it counts them."""
    prefill_faults: int = 0
    decode_faults: int = 0
    """Pages that the process touched for the first time in the prefill, and in the whole loop behind it."""
    scheduled: tuple[Scheduled, ...] = ()
    """The iterations of prefill and loop as the engine's own scheduler told them; empty where it has none."""
    cache_used_bytes: int | None = None
    """Most of an engine's own cache that was in use at once."""
    first_decode_s: tuple[float, ...] = ()
    """Decode steps of the first, untimed loop of this shape in the process (CUDA)."""

    def merge_into(self, merged: MergedFacts) -> None:
        merged.visits.setdefault(self.cell, []).append(self)
        merged.gaps.pop(self.cell, None)  # a resumed run tries it once more

    @property
    def prefill_iterations(self) -> int:
        """Iterations of an engine's own scheduler until the last prompt was through; 0 where it has none."""
        return prefill_iterations(self.scheduled)

    @property
    def prefills_s(self) -> tuple[float, ...]:
        """All its timed prefills."""
        return () if self.prefill_s is None else (*self.more_prefill_s, self.prefill_s)


@dataclass(frozen=True)
class Gap(Fact, kind="gap"):
    """A cell without a number, and why."""

    cell: Cell
    status: Status
    reason: str

    def merge_into(self, merged: MergedFacts) -> None:
        merged.gaps[self.cell] = self


def steady(decode_s: tuple[float, ...]) -> tuple[float, ...]:
    """The decode steps after the first one."""
    return decode_s[1:]


def phase_samples(phase: Phase, visits: Sequence[Visit]) -> list[tuple[float, ...]]:
    """What a phase's figure rests on: the times of each visit that has some."""
    if phase == "prefill":
        return [visit.prefills_s for visit in visits if visit.prefills_s]
    return [steady(visit.decode_s) for visit in visits]


def phase_medians(phase: Phase, visits: Sequence[Visit]) -> dict[int, float]:
    """The median time of a phase in each round that visited it."""
    return {
        visit.round: statistics.median(samples)
        for visit in visits
        for samples in phase_samples(phase, [visit])
        if samples
    }
