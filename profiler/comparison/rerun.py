"""`gate --rerun`: measure the grid of a base run again, with extra visits to the cells that stay open."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from profiler.comparison.command import gated, thresholds
from profiler.comparison.compare import compare_sides
from profiler.comparison.gate import Gate, gate
from profiler.comparison.side import PROCESSOR, MatchKey, Side, differences, match_key, read_side, timed_cells
from profiler.device.machine import Machine, machine_for
from profiler.engines.base import Engine
from profiler.errors import RequestError
from profiler.facts.visits import Gap, Visit
from profiler.grid.cells import Cell, Phase
from profiler.loading.prompts import Prompts
from profiler.measure.rounds import Plan
from profiler.measure.sweep import VisitContext, sweep, visit
from profiler.run.options import Options
from profiler.run.pipeline import execute
from profiler.run.stages import Listener
from profiler.run.validate import prepare_rerun

# Share of the budget for the sweep; the rest, and what the sweep leaves, goes to open cells.
_SWEEP_SHARE = 0.4
_MOST_ROUNDS = 50
_SEED = 0


def rerun(base: Path, max_slowdown: str, options: Options, listener: Listener) -> Gate:
    """Measure the grid of `base` again and gate the new run against it; `options` as in `prepare_rerun`.

    Raises RequestError if the run cannot be repeated on this machine.
    """
    limits = thresholds(max_slowdown)
    prepared = prepare_rerun(base, options)
    before = read_side(base)
    _refuse_another_machine(base, before, machine_for(prepared.request.device))
    run = execute(prepared, listener, lambda *args, **named: visits_of_open(before, limits, *args, **named))
    return gated(base, run.folder, max_slowdown)


def _refuse_another_machine(base: Path, before: Side, machine: Machine) -> None:
    """Raise RequestError, before anything is measured, if `base` comes from a machine that is not comparable."""
    facts = machine.source.facts()
    here = {"device": machine.info.name, **({PROCESSOR: str(facts[PROCESSOR])} if facts.get(PROCESSOR) else {})}
    after = replace(before, settings={**before.settings, **here})
    reasons = [item.words for item in differences(before, after) if item.weight == "refuses"]
    if reasons:
        raise RequestError(f"{base} is of another machine: {'; '.join(reasons)}. Measure a base on this one.")


def visits_of_open(
    before: Side,
    limits: Mapping[Phase, float],
    engines: Mapping[str, Engine],
    plan: Plan,
    *,
    machine: Machine,
    prompts: Prompts,
    own_bytes: Mapping[str, int],
    before_visits: Callable[[], None] = lambda: None,
    **named: object,
) -> Iterator[Visit | Gap]:
    """Sweep the grid, then visit in rounds only the cells that a gate against `before` leaves open.

    The order within a round is shuffled (seeded), so drift affects all open cells alike. Rounds end with the budget.
    """
    start_s = machine.now_s()
    visits: dict[Cell, list[Visit]] = {}
    short_plan = replace(plan, budget_s=_SWEEP_SHARE * plan.budget_s)
    context = {"machine": machine, "prompts": prompts, "own_bytes": own_bytes}
    for outcome in sweep(engines, short_plan, before_visits=before_visits, **context, **named):  # type: ignore[arg-type]
        if isinstance(outcome, Visit):
            visits.setdefault(outcome.cell, []).append(outcome)
        yield outcome
    bench, shuffle = VisitContext(machine, prompts, own_bytes), random.Random(_SEED)
    rounds = 1 + max((visit.round for of_cell in visits.values() for visit in of_cell), default=0)
    for round_number in range(rounds, rounds + _MOST_ROUNDS):
        still_open = open_cells(before, limits, visits)
        shuffle.shuffle(still_open)
        for cell in still_open:
            before_visits()
            if machine.now_s() - start_s + visits[cell][-1].wall_s > plan.budget_s:
                return
            visited = visit(engines[cell.engine], cell, round_number, bench)
            if visited is None:
                return
            if isinstance(visited, Visit):
                visits[cell].append(visited)
            yield visited
        if not still_open:
            return


def open_cells(before: Side, limits: Mapping[Phase, float], visits: Mapping[Cell, list[Visit]]) -> list[Cell]:
    """The cells that a gate against `before` leaves open after these visits."""
    cells: dict[MatchKey, Cell] = {match_key(key): key.cell for cell in visits for key in cell.keys}
    after = replace(before, cells=timed_cells(visits), witness=None)
    ids = [item.change.asked for item in gate(compare_sides(before, after), limits).cells if item.decision == "open"]
    return list(dict.fromkeys(cells[key] for key in ids if key in cells))
