"""What changes do to a cell's time: tried ones, other engines, and what is computed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from profiler.facts.change_ids import ChangeId
from profiler.facts.measurements import StepSamples, Trial
from profiler.grid.cells import KeyedRecord
from profiler.judge.difference import difference, is_claim
from profiler.stats import Estimate, undisturbed
from profiler.units import duration


@dataclass(frozen=True)
class EngineDifference(KeyedRecord):
    """The saving of an engine in a cell, compared with the run's first engine, with its 95 % interval."""

    against: str
    saves_s: float
    low_s: float
    high_s: float
    terms: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each term in this engine minus those in the first; empty if one of the breakdowns does not add up."""
    causes: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each cause of redundant work in this engine minus those in the first."""
    repetitions: int = 2
    """Repetitions of the engine with fewer. A single repetition does not show how much repetitions of one cell
    differ."""

    @property
    def is_claim(self) -> bool:
        """Whether both engines have enough repetitions and the whole interval is on one side of 0."""
        return is_claim(self.low_s, self.high_s, self.repetitions)


@dataclass(frozen=True, slots=True)
class ChangeEffect:
    """A change, and the time that it saves on one cell."""

    change: str
    """The change in words."""
    saves_s: float
    """Seconds per step that it saves; negative if it costs time."""
    because: str
    """The reason, with its figures."""
    basis: Literal["tried", "measured", "computed"] = "computed"
    """Tried on this device at this shape, measured in this run, or computed from the cell's time breakdown."""
    half_width_s: float = 0.0
    """Half width of the interval of `saves_s`."""
    at_most: bool = False
    """Whether `saves_s` is an upper bound; other computed changes are estimates."""
    at_least_s: float | None = None
    """Lower end of a computed saving, of which `saves_s` is the upper end; None if there is only one figure."""
    how: str = ""
    """The line with which a user makes this change; of a tried change the one that was executed."""
    id: ChangeId | None = None
    """The change; None for an engine that has no such name, or in an older run."""
    value: str = ""
    """Which of this kind of change it is."""
    preparing_s: float = 0.0
    """Expected seconds that a change costs once, such as for compiling."""

    @property
    def amount(self) -> str:
        """The time saved in words: a bound is "at most", an estimate "about", a measurement neither."""
        if self.at_least_s is not None and duration(self.at_least_s) != duration(self.saves_s):
            return f"between {duration(self.at_least_s)} and {duration(self.saves_s)}"
        kind = "at most " if self.at_most else "about " if self.basis == "computed" else ""
        return kind + duration(self.saves_s)

    @property
    def middle_s(self) -> float:
        """The middle of what it may save: a bound starts at 0, a range at its lower end."""
        least_s = 0.0 if self.at_most else self.saves_s if self.at_least_s is None else self.at_least_s
        return (least_s + self.saves_s) / 2

    @property
    def is_claim(self) -> bool:
        """Whether the sign of the saving is certain."""
        return abs(self.saves_s) > self.half_width_s and (self.at_least_s is None or self.at_least_s > 0)

    def limited_to(self, most_s: float) -> Self:
        """The change where no change saves more than `most_s` seconds."""
        least_s = None if self.at_least_s is None else min(self.at_least_s, most_s)
        return replace(self, saves_s=min(self.saves_s, most_s), at_least_s=least_s)


@dataclass(frozen=True)
class TrialResult:
    """A trial, and how the time of a step with its change compares."""

    trial: Trial
    ratio: float
    """Time with the change over the time of the model as loaded, both of the whole model."""
    half_width: float
    """Half width of the ratio's interval: the wider half."""
    before_s: float = 0.0
    """Seconds of a step of the model as loaded, by the trial; 0 if unknown."""

    @property
    def change(self) -> ChangeId | None:
        return self.trial.what[0] if self.trial.what else None

    @property
    def is_whole(self) -> bool:
        """Whether the whole model was stepped, so that the time of its step is known and not extrapolated."""
        return self.trial.layers == self.trial.of_layers and self.before_s > 0

    def steps_s(self, latency_s: float) -> tuple[float, float]:
        """Seconds of a step without and with the change: the trial's own, or shares of the measured `latency_s`.

        A trial calls `generate`, whose step takes longer than the run's own.
        """
        before_s = self.before_s if self.is_whole else latency_s
        return before_s, self.ratio * before_s

    def half_width_at(self, latency_s: float, known_to_s: float) -> float:
        """Half width of the ratio for a step measured as `latency_s`, give or take `known_to_s`.

        It includes the difference between that time and the trial's beyond `known_to_s`, since a few layers may not
        represent the model.
        """
        if self.is_whole or not self.before_s:
            return self.half_width
        apart = (self.before_s / latency_s - 1) ** 2 - (known_to_s / latency_s) ** 2
        return math.hypot(self.half_width, math.sqrt(max(0.0, apart)))


def trial_results(trials: Sequence[Trial]) -> Iterator[TrialResult]:
    """The results of a step's trials, of each line the one with the most layers."""
    by_layers = sorted(trials, key=lambda trial: trial.layers)
    for trial in {(trial.form, trial.line): trial for trial in by_layers}.values():
        before, after = (whole_step(each, trial.of_layers / trial.layers) for each in (trial.before, trial.after))
        found = difference(before, after, None)
        half_width = max(found.high - found.change, found.change - found.low)
        yield TrialResult(trial, 1 + found.change, half_width, before.median_s)


def whole_step(stepped: StepSamples, times: float) -> Estimate:
    """Undisturbed seconds of a step of the whole model: `times` as many repeating layers, of equal cost each."""
    steps = zip(stepped.layers_s, stepped.beside_s, strict=True)
    found = undisturbed([beside_s + times * layers_s for layers_s, beside_s in steps])
    factor = math.exp(found.half_width_s / found.quartile_s)  # a time is positive
    return Estimate(found.quartile_s, found.quartile_s / factor, found.quartile_s * factor, len(stepped.layers_s))
