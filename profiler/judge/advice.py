"""Advice: changes whose lines were executed in this run and that save time, with all that they were seen to do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from profiler.facts.change_ids import ChangeId, exclude
from profiler.grid.cells import Phase
from profiler.json_document import view
from profiler.judge.cell_stages import Judged
from profiler.judge.changes import WORTH, saves_clearly
from profiler.judge.savings import TrialResult
from profiler.units import duration


@dataclass(frozen=True)
class Effect:
    """What a tried change does to one time of a cell."""

    before_s: float
    after_s: float
    half_width_s: float
    """Half width of the interval of their difference."""

    @property
    def saves_s(self) -> float:
        return self.before_s - self.after_s

    @property
    def is_clear(self) -> bool:
        """Whether the sign of the difference is certain."""
        return abs(self.saves_s) > self.half_width_s


@dataclass(frozen=True)
class Advice:
    """A change whose line was executed at one shape, and what it did there."""

    change: ChangeId
    phrase: str
    """The change, as a sentence names it."""
    line: str
    """The line as it was executed."""
    batch_size: int
    prompt_len: int
    step: Effect | None
    """A decode step; None if it was not timed."""
    prefill: Effect | None
    layers: int
    """Repeating layers of the model that was stepped."""
    of_layers: int
    once_s: float = 0.0
    """Seconds that it costs once per process."""
    tokens: int = 0
    """Greedy tokens that were compared; 0 if the weights of both sides differ at random."""
    same_tokens: int = 0

    @property
    def pays_from_tokens(self) -> int | None:
        """New tokens per prompt from which it saves time, if its prefill is slower; None if it always saves."""
        if self.step is None or self.prefill is None or self.prefill.saves_s >= 0 or not self.prefill.is_clear:
            return None
        return math.ceil(-self.prefill.saves_s / self.step.saves_s) if self.step.saves_s > 0 else None

    @property
    def pays_up_to_tokens(self) -> int | None:
        """New tokens per prompt up to which it saves time, if its steps are slower; None if they are not."""
        if self.step is None or self.prefill is None or self.step.saves_s >= 0 or not self.step.is_clear:
            return None
        return max(0, math.floor(self.prefill.saves_s / -self.step.saves_s))

    def share_left(self, phase: Phase) -> float:
        """Return the share of a prefill or a step that is left with the change; 1 if it was not timed."""
        effect = self.prefill if phase == "prefill" else self.step
        return effect.after_s / effect.before_s if effect else 1.0

    def clear_effects(self, step: str) -> list[str]:
        """Return `a decode step of 7.86 ms instead of 21.7 ms` of each clear effect; `step` names a decode step."""
        return [
            f"a {name} of {duration(effect.after_s)} instead of {duration(effect.before_s)}"
            for name, effect in ((step, self.step), ("prefill", self.prefill))
            if effect and effect.is_clear
        ]


def advice_for(cells: Sequence[Judged], every: Sequence[Judged]) -> list[Advice]:
    """Return the changes whose lines save time on each of `cells`, those first that save most.

    `every` has the other phase of their shapes. Of changes that exclude each other, the first is returned, and another
    one only if it saves clearly more of a further phase.
    """
    kept: list[Advice] = []
    for cell in cells:
        phase = cell.key.phase
        other_phase = next((each for each in every if each.key.cell == cell.key.cell and each.key != cell.key), None)
        clear = [item for item in cell.tried if item.trial.line and item.change and saves_clearly(cell, item)]
        for advice in (_advice(cell, item, other_phase) for item in sorted(clear, key=lambda item: item.ratio)):
            most = advice.share_left(phase) + WORTH
            if not any(exclude(advice.change, each.change) and each.share_left(phase) <= most for each in kept):
                kept.append(advice)
    return kept


def _advice(cell: Judged, result: TrialResult, other_phase: Judged | None) -> Advice:
    trial, shape = result.trial, cell.key.cell
    same = [item for item in (other_phase.tried if other_phase else ()) if item.trial.line == trial.line]
    effects = {cell.key.phase: _effect(cell, result)}
    if other_phase is not None and same:
        effects[other_phase.key.phase] = _effect(other_phase, same[0])
    return view(
        Advice, trial, change=result.change, phrase=trial.form, batch_size=shape.batch_size, prompt_len=shape.depth,
        step=effects.get("decode"), prefill=effects.get("prefill"),
    )  # fmt: skip


def _effect(cell: Judged, result: TrialResult) -> Effect:
    latency_s = cell.terms.latency_s
    before_s, after_s = result.steps_s(latency_s)
    # The turns of a trial do not show how much the machine's speed changes until the next minute.
    known_to_s = cell.timed.half_width_s
    half_width = math.hypot(result.half_width_at(latency_s, known_to_s), known_to_s / latency_s * (1 - result.ratio))
    return Effect(before_s, after_s, before_s * half_width)
