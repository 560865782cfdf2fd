"""What changes that were tried on a short model say of the whole one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from profiler.diagnosis.facts import Stepped, Trial
from profiler.grid import Cell, CellKey, Phase
from profiler.machine.clock import Timing, timing_of


@dataclass(frozen=True)
class Tried:
    """A cell's step in another form, by a trial."""

    form: str
    ratio: float
    """Its time over the time as it is, both of a whole model."""
    half_width: float
    """How far the ratio may be off."""
    layers: int
    """Layers that were stepped."""
    of_layers: int


def tried(trials: Mapping[Cell, Sequence[Trial]], key: CellKey) -> Iterator[Tried]:
    """Every form that was tried at a cell's shape."""
    for trial in trials.get(key.cell, ()):
        before = whole_step(trial.before, key.phase, trial.of_layers)
        after = whole_step(trial.after, key.phase, trial.of_layers)
        ratio = after.median_s / before.median_s
        off = math.hypot(after.half_width_s / after.median_s, before.half_width_s / before.median_s)
        yield Tried(trial.form, ratio, ratio * off, trial.after[0].layers, trial.of_layers)


def whole_step(stepped: Sequence[Stepped], phase: Phase, of_layers: int) -> Timing:
    """Seconds of a step of all layers, from steps with more and with fewer of them.

    Layers cost alike: what the more take beyond the fewer, a layer, is added for those that were left out.
    """
    more = timing_of(_seconds(stepped[0], phase))
    if len(stepped) == 1 or stepped[0].layers == of_layers:
        return more
    fewer = timing_of(_seconds(stepped[1], phase))
    times = (of_layers - stepped[0].layers) / (stepped[0].layers - stepped[1].layers)
    seconds = more.median_s + times * (more.median_s - fewer.median_s)
    off_s = math.hypot((1 + times) * more.half_width_s, times * fewer.half_width_s)
    return Timing(max(seconds, more.median_s), off_s)


def _seconds(stepped: Stepped, phase: Phase) -> tuple[float, ...]:
    return stepped.prefill_s if phase == "prefill" else stepped.decode_s
