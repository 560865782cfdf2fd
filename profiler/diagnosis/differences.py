"""What each further engine of a run saves against the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from profiler.diagnosis.cell import EngineDifference, JudgedCell, columns_of
from profiler.diagnosis.facts import Facts
from profiler.diagnosis.step_time import TERMS, adds_up
from profiler.grid import CellKey, Phase
from profiler.timing.outcomes import phase_samples
from profiler.timing.sampling import Spread, difference

_Name = TypeVar("_Name", bound=str)


def engine_differences(
    facts: Facts, spreads: Mapping[Phase, Spread], judged: Mapping[CellKey, JudgedCell]
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
