"""What changes that were tried on a short model say of the whole one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from profiler.diagnosis.facts import Stepped, Trial
from profiler.machine.clock import Undisturbed, undisturbed


@dataclass(frozen=True)
class Tried:
    """A step in another form, by a trial."""

    form: str
    ratio: float
    """Its time over the time as it is, both of a whole model."""
    half_width: float
    """How far the ratio may be off."""
    layers: int
    """Layers that were stepped."""
    of_layers: int


def tried(trials: Sequence[Trial]) -> Iterator[Tried]:
    """Every form that was tried at a step's shape."""
    for trial in trials:
        before, after = (whole_step(each, trial.of_layers / trial.layers) for each in (trial.before, trial.after))
        ratio = after.quartile_s / before.quartile_s
        off = math.hypot(after.half_width_s / after.quartile_s, before.half_width_s / before.quartile_s)
        yield Tried(trial.form, ratio, ratio * off, trial.layers, trial.of_layers)


def whole_step(stepped: Stepped, times: float) -> Undisturbed:
    """Seconds of a step of the whole model, which has `times` as many repeating layers: layers of a kind cost alike."""
    steps = zip(stepped.layers_s, stepped.beside_s, strict=True)
    return undisturbed([beside_s + times * layers_s for layers_s, beside_s in steps])
