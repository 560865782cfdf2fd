"""A gate that measures its new side: the grid of the base, with the time spent where the answer is open."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from profiler.comparison.command import gated, thresholds
from profiler.comparison.compare import compare_sides
from profiler.comparison.gate import Gate, gate
from profiler.comparison.side import PROCESSOR, CellId, Side, cell_id, differences, read_side, timed_cells
from profiler.device.machine import Machine, machine_for
from profiler.engines.base import Engine
from profiler.errors import RequestError
from profiler.facts.visits import Gap, Visit
from profiler.grid.cells import Cell, Phase
from profiler.measure.sweep import Plan, sweep
from profiler.measure.visit import VisitContext, visit_safely
from profiler.run.options import Options
from profiler.run.pipeline import execute
from profiler.run.stages import Listener
from profiler.run.validate import prepare_rerun

# The sweep itself gets this share of the budget; what it leaves and the rest go to what is open.
_SWEEP_SHARE = 0.4
_MOST_ROUNDS = 50
_SEED = 0


def rerun(base: Path, max_slowdown: str, options: Options, listener: Listener) -> Gate:
    """Measure the grid of a run anew and gate it against that run; `options` as in `prepare_rerun`.

    Raises RequestError where the run cannot be repeated here.
    """
    limits = thresholds(max_slowdown)
    prepared = prepare_rerun(base, options)
    before = read_side(base)
    _refuse_another_machine(base, before, machine_for(prepared.request.device))
    run = execute(prepared, listener, lambda *args, **named: visits_of_open(before, limits, *args, **named))
    return gated(base, run.folder, max_slowdown)


def _refuse_another_machine(base: Path, before: Side, machine: Machine) -> None:
    """What could be held against nothing is not measured. Raises RequestError."""
    facts = machine.source.facts()
    known = {"device": machine.info.name, **({PROCESSOR: str(facts[PROCESSOR])} if facts.get(PROCESSOR) else {})}
    found = differences(before, replace(before, settings={**before.settings, **known}))
    reasons = [item.words for item in found if item.weight == "refuses"]
    if reasons:
        raise RequestError(f"{base} is of another machine: {'; '.join(reasons)}. Measure a base on this one.")


def visits_of_open(
    before: Side,
    limits: Mapping[Phase, float],
    engines: Mapping[str, Engine],
    plan: Plan,
    *,
    machine: Machine,
    vocab_size: int,
    own_bytes: Mapping[str, int],
    on_round: Callable[[], None] = lambda: None,
    **named: object,
) -> Iterator[Visit | Gap]:
    """A sweep, and then round after round of those cells alone that a gate against `before` leaves open.

    The rounds are shuffled (seeded), so that drift hits all open cells alike, and end with the budget.
    """
    start_s = machine.now_s()
    seen: dict[Cell, list[Visit]] = {}
    short = replace(plan, budget_s=_SWEEP_SHARE * plan.budget_s)
    held = {"machine": machine, "vocab_size": vocab_size, "own_bytes": own_bytes}
    for outcome in sweep(engines, short, on_round=on_round, **held, **named):  # type: ignore[arg-type]
        if isinstance(outcome, Visit):
            seen.setdefault(outcome.cell, []).append(outcome)
        yield outcome
    bench, shuffle = VisitContext(machine, vocab_size, own_bytes), random.Random(_SEED)
    rounds = 1 + max((visit.round for visits in seen.values() for visit in visits), default=0)
    for round_number in range(rounds, rounds + _MOST_ROUNDS):
        still_open = open_cells(before, limits, seen)
        shuffle.shuffle(still_open)
        on_round()
        for cell in still_open:
            if machine.now_s() - start_s + seen[cell][-1].wall_s > plan.budget_s:
                return
            outcome = visit_safely(engines[cell.engine], cell, round_number, bench)
            if isinstance(outcome, Visit):
                seen[cell].append(outcome)
            yield outcome
        if not still_open:
            return


def open_cells(before: Side, limits: Mapping[Phase, float], seen: Mapping[Cell, list[Visit]]) -> list[Cell]:
    """The cells that a gate leaves open as far as they are measured."""
    cells: dict[CellId, Cell] = {cell_id(key): key.cell for cell in seen for key in cell.keys}
    after = replace(before, cells=timed_cells(seen), witness=None)
    found = gate(compare_sides(before, after), limits)
    waiting = [item.change.asked for item in found.cells if item.decision == "open"]
    return list(dict.fromkeys(cells[asked] for asked in waiting if asked in cells))
