"""Dispatch: what the host spends on a step, from the steps of the hollow twin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler.facts.fact import Fact
from profiler.grid.cells import Phase
from profiler.stats import Undisturbed, timing_of, undisturbed

if TYPE_CHECKING:
    from profiler.facts.merged import MergedFacts


@dataclass(frozen=True)
class Calls:
    """Seconds of one call of something that a step calls `count` times."""

    count: int
    seconds: tuple[float, ...]

    @property
    def total_s(self) -> float:
        return self.count * timing_of(self.seconds).median_s


@dataclass(frozen=True)
class DispatchSamples(Fact, kind="dispatch"):
    """The hollow twin's steps as they were measured, for one engine, phase and batch size."""

    engine: str
    phase: Phase
    batch_size: int
    alone_s: tuple[float, ...]
    """Steps of the twin by itself."""
    among_s: tuple[float, ...] = ()
    """Steps between whose operators the model's own linears ran, without their time; empty where the twin steps
    alone."""
    bare_s: tuple[float, ...] = ()
    """All calls of the twin's own linears, between the model's."""
    cores: tuple[Calls, ...] = ()
    """The twin's attention cores and experts alone."""
    conversions: tuple[Calls, ...] = ()
    """The twin's conversions between formats alone."""
    waits: bool = False
    """Whether such a step waits for its device on the way."""

    def merge_into(self, merged: MergedFacts) -> None:
        step, found = (self.engine, self.phase, self.batch_size), dispatch_of(self)
        merged.dispatch[step] = min(found, merged.dispatch.get(step, found), key=lambda item: item.step_s)


@dataclass(frozen=True)
class Dispatch:
    """What the host spends on a step, measured on the hollow twin."""

    step_s: float
    """All of it: Python, the dispatcher, the calls of kernels that have next to nothing to do."""
    in_kernels_s: float
    """The part that a replayed kernel of the model pays as well: the bare calls of linears and attention cores."""
    in_conversions_s: float = 0.0
    """The part of `in_kernels_s` that kernels pay which only convert between formats."""
    half_width_s: float = 0.0
    """How far `step_s` may be off."""
    waits: bool = False
    """Whether the step itself waits for its device, so that it can hide less than a host that runs ahead."""


def dispatch_of(samples: DispatchSamples) -> Dispatch:
    """Dispatch of a step of one engine, phase and batch size."""
    alone = undisturbed(samples.alone_s)
    if not samples.bare_s:
        # On CUDA a replayed kernel's launch hides behind the one before it, so nothing is paid twice.
        return Dispatch(alone.quartile_s, 0.0, half_width_s=alone.half_width_s, waits=samples.waits)
    among = undisturbed(samples.among_s) if samples.among_s else Undisturbed(alone.quartile_s, 0.0)
    calls_s = undisturbed(samples.bare_s).quartile_s + sum(call.total_s for call in samples.cores)
    return cold_dispatch(alone, among, calls_s, sum(call.total_s for call in samples.conversions))


def dispatch_seconds(
    dispatch: Mapping[tuple[str, Phase, int], Dispatch],
) -> dict[str, dict[Phase, dict[int, float]]]:
    """Seconds to dispatch a step, by engine, phase and batch size."""
    found: dict[str, dict[Phase, dict[int, float]]] = {}
    for (engine, phase, batch), known in dispatch.items():
        found.setdefault(engine, {}).setdefault(phase, {})[batch] = known.step_s
    return found


def cold_dispatch(warm: Undisturbed, among: Undisturbed, calls_s: float, converting_s: float = 0.0) -> Dispatch:
    """Dispatch within a real step, from the twin's step alone, its step among the weights, and its bare calls.

    Cold caches cannot make a step faster than warm ones: what a busy minute says against it does not count, and the
    twin alone is the floor. The calls are a part of the step, and those that only convert between formats a part of the
    calls.
    """
    step_s = max(among.quartile_s, warm.quartile_s)
    in_kernels_s = min(calls_s, step_s)
    half_width_s = math.hypot(among.half_width_s, warm.half_width_s)
    return Dispatch(step_s, in_kernels_s, min(converting_s, in_kernels_s), half_width_s)
