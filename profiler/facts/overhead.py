"""Overhead: the host's time for a step, measured on the overhead model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from profiler.facts.fact import Fact, MergedFacts
from profiler.facts.repetitions import Repetition, phase_samples
from profiler.grid.cells import Cell, Phase
from profiler.stats import LowerQuartile, timing_of, undisturbed


@dataclass(frozen=True)
class Calls:
    """Samples of one call, in seconds, and the number of such calls in a step."""

    count: int
    seconds: tuple[float, ...]

    @property
    def total_s(self) -> float:
        return self.count * timing_of(self.seconds).median_s


@dataclass(frozen=True)
class OverheadSamples(Fact, kind="dispatch"):
    """Measured steps of the overhead model for one engine, phase and batch size, in seconds."""

    engine: str
    phase: Phase
    batch_size: int
    alone_s: tuple[float, ...]
    """Steps of the overhead model in isolation."""
    among_s: tuple[float, ...] = ()
    """Steps with the model's linears between its operators, without the linears' time; empty if not measured."""
    bare_s: tuple[float, ...] = ()
    """All calls of the overhead model's linears, between those of the model."""
    cores: tuple[Calls, ...] = ()
    """The overhead model's attention cores and experts in isolation."""
    conversions: tuple[Calls, ...] = ()
    """The overhead model's conversions between formats in isolation."""
    waits: bool = False
    """Whether the host waits for the device within such a step."""

    def merge_into(self, merged: MergedFacts) -> None:
        step, overhead = (self.engine, self.phase, self.batch_size), overhead_of(self)
        merged.overhead[step] = min(overhead, merged.overhead.get(step, overhead), key=lambda item: item.step_s)


@dataclass(frozen=True)
class Overhead:
    """The host's seconds for a step, measured on the overhead model."""

    step_s: float
    """Total: Python, the dispatcher, and calls of kernels with next to no work."""
    in_kernels_s: float
    """The part that replayed kernels of the model also pay: the bare calls of linears and attention cores."""
    in_conversions_s: float = 0.0
    """The part of `in_kernels_s` for kernels that only convert between formats."""
    half_width_s: float = 0.0
    """Half-width of the interval of `step_s`, about 95 % (see `stats.Timing`)."""
    waits: bool = False
    """Whether the host waits for the device within the step, so that less of the overhead is hidden."""
    disturbed_s: float = 0.0
    """Seconds of the overhead model's step if faster steps of the model bound `step_s`; 0 otherwise."""
    least_s: float = 0.0
    """The fastest of the overhead model's steps, on a host that runs ahead of its device."""


def overhead_of(samples: OverheadSamples) -> Overhead:
    """Return the overhead of a step from its samples.

    A real step finds cold caches, which cannot make it faster. So the step in isolation is the lower bound, even if
    contention made the one among linears faster.
    """
    alone = undisturbed(samples.alone_s)
    if not samples.bare_s:
        # On CUDA the launch of a replayed kernel overlaps with the kernel before it, so nothing counts twice.
        least_s = min(samples.alone_s)
        return Overhead(alone.quartile_s, 0.0, half_width_s=alone.half_width_s, waits=samples.waits, least_s=least_s)
    among = undisturbed(samples.among_s) if samples.among_s else LowerQuartile(alone.quartile_s, 0.0)
    step_s = max(among.quartile_s, alone.quartile_s)
    calls_s = undisturbed(samples.bare_s).quartile_s + sum(call.total_s for call in samples.cores)
    in_kernels_s = min(calls_s, step_s)
    in_conversions_s = min(sum(call.total_s for call in samples.conversions), in_kernels_s)
    return Overhead(step_s, in_kernels_s, in_conversions_s, math.hypot(among.half_width_s, alone.half_width_s))


def bounded_by_steps(
    overhead: Mapping[tuple[str, Phase, int], Overhead], repetitions: Mapping[Cell, Sequence[Repetition]]
) -> dict[tuple[str, Phase, int], Overhead]:
    """Return overhead that is at most the fastest whole step of its engine and phase, for a host that runs ahead.

    No step ends before its host has issued it, whatever its shape; what the overhead model launches more for a larger
    batch comes on top. On a virtual machine whose cores others use too, the overhead model may be measured in a slow
    moment: 35 ms, where whole steps took 24.
    """
    bounded = dict(overhead)
    for key, item in overhead.items():
        step = _fastest_step(overhead, repetitions, key)
        if step is not None and step.quartile_s < item.step_s:
            own_s, half_width_s = step.quartile_s, step.half_width_s
            bounded[key] = replace(item, step_s=own_s, half_width_s=half_width_s, disturbed_s=item.step_s)
    return bounded


def _fastest_step(
    overhead: Mapping[tuple[str, Phase, int], Overhead],
    repetitions: Mapping[Cell, Sequence[Repetition]],
    key: tuple[str, Phase, int],
) -> LowerQuartile | None:
    """The undisturbed time of the fastest repetition, with the overhead that only a larger batch has; else None.

    A median is no lower bound: half of the steps of its own repetition are faster, and so are other repetitions.
    """
    engine, phase, batch = key
    found = []
    for cell, of_cell in repetitions.items():
        if cell.engine != engine:
            continue
        there = overhead.get((engine, phase, cell.batch_size), overhead[key])
        # A smaller batch launches nothing more, though its overhead may have been measured in a slower moment.
        more_s = max(0.0, overhead[key].step_s - there.step_s) if batch > cell.batch_size else 0.0
        timed = (undisturbed(samples) for samples in phase_samples(phase, of_cell) if samples)
        found += [replace(item, quartile_s=item.quartile_s + more_s) for item in timed]
    return min(found, key=lambda item: item.quartile_s, default=None)


def overhead_seconds(overhead: Mapping[tuple[str, Phase, int], Overhead]) -> dict[str, dict[Phase, dict[int, float]]]:
    """Return the seconds to launch a step: engine -> phase -> batch size -> seconds."""
    seconds: dict[str, dict[Phase, dict[int, float]]] = {}
    for (engine, phase, batch), step in overhead.items():
        seconds.setdefault(engine, {}).setdefault(phase, {})[batch] = step.step_s
    return seconds
