"""What an engine saves against the run's first one, and what `generate` adds to our own loop."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from profiler.facts.measurements import GenerateSteps
from profiler.facts.run_facts import Facts
from profiler.facts.visits import phase_samples
from profiler.grid.cells import DEFAULT_ENGINE, CellKey, Phase
from profiler.judge.breakdown import TERMS, adds_up
from profiler.judge.cells import EngineDifference, JudgedCell, Keyed, columns_of
from profiler.stats import CLAIM_VISITS, Estimate, VisitSpread, difference

_Name = TypeVar("_Name", bound=str)


def engine_differences(
    facts: Facts, spreads: Mapping[Phase, VisitSpread], judged: Mapping[CellKey, JudgedCell]
) -> list[EngineDifference]:
    """What each further engine saves against the first, cell by cell, with its interval."""
    if facts.grid.ragged is not None:
        return []  # without its mask a padded batch is another task, not another engine
    first, *others = facts.grid.engines
    found = []
    for key in facts.grid.keys:
        base = replace(key.cell, engine=first)
        if key.cell.engine not in others or not (facts.visits.get(key.cell) and facts.visits.get(base)):
            continue
        before, after = (phase_samples(key.phase, facts.visits[each]) for each in (base, key.cell))
        saved = difference(before, after, spreads[key.phase])
        cells = judged.get(replace(key, cell=base)), judged.get(key)
        found.append(
            EngineDifference(
                **columns_of(key),
                against=first,
                saves_s=saved.median_s,
                low_s=saved.low_s,
                high_s=saved.high_s,
                terms=_gained_terms(*cells),
                causes=_gained(*(cell.avoidable_s if cell else {} for cell in cells)),
                how=facts.owning_engines.get(key.cell.engine, ""),
                visits=min(len(before), len(after)),
            )
        )
    return found


def _gained_terms(before: JudgedCell | None, after: JudgedCell | None) -> dict[str, float]:
    if before is None or after is None or not (adds_up(before.split) and adds_up(after.split)):
        return {}
    return _gained(*({term: getattr(cell.split, term) for term in TERMS} for cell in (before, after)))


def _gained(before: Mapping[_Name, float], after: Mapping[_Name, float]) -> dict[str, float]:
    """What each of two maps' names gained, without those that both lack."""
    gained = {str(name): after.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **after}}
    return {name: seconds for name, seconds in gained.items() if seconds}


PART_NAMES = {
    "read": "reading on the host whether all are done",
    "stopping": "stopping criteria",
    "processors": "logits processors",
    "inputs": "input preparation",
    "cache": "cache growth",
    "forward": "mask and positions in the forward",
    "rest": "the rest: casts, copies, Python",
}
"""Where the tax of a decode step goes. `cache` and `forward` are what they take beyond our own loop's."""

_SHARED = ("cache", "forward")


@dataclass(frozen=True)
class GenerateOverhead(Keyed):
    """What `generate` adds to a step, with its 95 % interval."""

    transformers: str
    tax_s: float
    low_s: float
    high_s: float
    own_s: float
    """The step of our own loop."""
    visits: int
    """Of the loop that was visited less often: a single one does not tell what visits of the same cell differ by."""
    parts_s: Mapping[str, float]
    """By PART_NAMES; they add up to the tax. Empty for a prompt, and where there was no time to look."""
    reads_a_token: float | None = None
    """Values that the host reads from the device at every step, and waits for."""
    streamer_s: float | None = None
    """What the least streamer would add to a step; not in the tax, since none was used."""

    @property
    def is_claim(self) -> bool:
        """Whether both were visited in turn and the whole interval lies on one side."""
        return self.visits >= CLAIM_VISITS and self.low_s * self.high_s > 0


def generate_overhead(facts: Facts, key: CellKey, spread: VisitSpread) -> Estimate | None:
    """What a cell of `generate` takes beyond the same cell of our own loop, visited in turn; None for others."""
    own = replace(key.cell, engine=DEFAULT_ENGINE)
    if key.cell.engine not in facts.generate_engines or not (facts.visits.get(key.cell) and facts.visits.get(own)):
        return None
    whole, ours = (phase_samples(key.phase, facts.visits[cell]) for cell in (key.cell, own))
    return difference(whole, ours, spread)


def generate_overheads(facts: Facts, spreads: Mapping[Phase, VisitSpread]) -> list[GenerateOverhead]:
    """The tax of every cell of `generate`."""
    found = []
    for key in facts.measured:
        tax = generate_overhead(facts, key, spreads[key.phase])
        if tax is None:
            continue
        steps = facts.generate_steps.get(key.cell) if key.phase == "decode" else None
        own_visits = facts.visits[replace(key.cell, engine=DEFAULT_ENGINE)]
        own = phase_samples(key.phase, own_visits)
        found.append(
            GenerateOverhead(
                **columns_of(key),
                transformers=steps.transformers if steps else "",
                tax_s=tax.median_s,
                low_s=tax.low_s,
                high_s=tax.high_s,
                own_s=statistics.median(value for visit in own for value in visit),
                visits=min(len(own_visits), len(facts.visits[key.cell])),
                parts_s=parts_of(steps, tax.median_s) if steps else {},
                reads_a_token=steps.reads_a_token if steps else None,
                streamer_s=_streamer_s(steps) if steps else None,
            )
        )
    return found


def parts_of(steps: GenerateSteps, tax_s: float) -> dict[str, float]:
    """Seconds of each part of a tax; what both loops have counts by its difference, the rest is what is left."""
    within = {name: statistics.median(values) for name, values in steps.parts_s.items()}
    own = {name: statistics.median(values) for name, values in steps.own_s.items()}
    parts = {name: within[name] for name in PART_NAMES if name in within and name not in _SHARED}
    parts["cache"] = within["cache"] - own["cache"]
    # Growing the cache lies within the forward.
    parts["forward"] = within["forward"] - own["forward"] - parts["cache"]
    return {**parts, "rest": tax_s - sum(parts.values())}


def _streamer_s(steps: GenerateSteps) -> float:
    return max(0.0, statistics.median(steps.streamed_s) - statistics.median(steps.parts_s["read"]))
