"""The sweep: every cell visited in interleaved rounds, until its interval is narrow or the time is spent."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from profiler.engines.base import Engine
from profiler.grid import PHASES, Cell, Grid, Phase
from profiler.machine.machine import Machine
from profiler.timing.outcomes import Gap, Visit, phase_medians, phase_samples
from profiler.timing.sampling import CLAIM_VISITS, TARGET_HALF_WIDTH, Spread, narrow_enough, spread_of
from profiler.timing.visit import Bench, visit_safely

_SEED = 0
_MOST_ROUNDS = 30


@dataclass(frozen=True)
class Progress:
    """Where the sweep is."""

    cell: Cell
    round: int
    elapsed_s: float
    left_s: float
    """Expected seconds to the end, from the visits so far; never more than the budget allows."""
    visits: int


@dataclass(frozen=True)
class Plan:
    """What to sweep, and when it is enough."""

    grid: Grid
    budget_s: float
    half_width: float = TARGET_HALF_WIDTH
    """Target half-width of the 95 % interval, as a share of the median."""
    expected_s: Mapping[Cell, float] = field(default_factory=dict)
    """Expected seconds a visit, used for the time left until a cell has been seen."""


@dataclass
class _Seen:
    """What is known of a cell so far."""

    visits: list[Visit] = field(default_factory=list)
    gap: Gap | None = None

    def narrow(self, half_width: float, spreads: Mapping[Phase, Spread]) -> bool:
        return bool(self.visits) and all(
            narrow_enough(phase_samples(key.phase, self.visits), spreads[key.phase], half_width)
            for key in self.visits[0].cell.keys
        )


def sweep(
    engines: Mapping[str, Engine],
    plan: Plan,
    *,
    machine: Machine,
    vocab_size: int,
    own_bytes: Mapping[str, int] | None = None,
    fits: Callable[[Cell], str | None] = lambda cell: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_round: Callable[[], float] = lambda: 0.0,
    earlier: Iterable[Visit | Gap] = (),
) -> Iterator[Visit | Gap]:
    """Visit the cells and yield each visit, and each cell that has no number, as it ends.

    The first round goes from small to large, so that a cell that does not fit is met before larger ones, and is
    always finished; later rounds are shuffled (seeded), visit only cells whose interval is still wide, and stop at
    the budget. No cell is visited a third time before all have had their second, which is what tells how far visits
    lie apart; engines are visited in turn, a cell's one right after the other. `on_round` is called before each round
    and tells by how much the machine's own time has swung so far. `fits` gives the reason why a cell cannot fit, or
    None. `own_bytes` are held beside what each engine needs. `earlier` are the outcomes of an interrupted
    sweep: its cells are known, and the first round visits only the others.
    """
    seen = {cell: _Seen() for cell in plan.grid.cells}
    for outcome in earlier:
        if isinstance(outcome, Gap):
            seen[outcome.cell].gap = outcome
        else:
            seen[outcome.cell].visits.append(outcome)
    bench = Bench(machine, vocab_size, own_bytes or {})
    shuffle = random.Random(_SEED)
    start = machine.now_s()
    durations: dict[Cell, float] = {}
    visits, swing = 0, 0.0
    for round_number in range(_MOST_ROUNDS):
        open_cells = _open_cells(seen, plan.half_width, swing)
        turns = _turns([cell for cell in open_cells if round_number > 0 or not seen[cell].visits])
        if round_number > 0:
            if not turns:
                return
            shuffle.shuffle(turns)
            turns = [turn[:: -1 if round_number % 2 else 1] for turn in turns]
        swing = on_round()
        visits_before = visits
        for position, turn in enumerate(turns):
            elapsed_s = machine.now_s() - start
            cost_s = sum(_cost(cell, plan, durations) for cell in turn)
            paired = all(len(seen[cell].visits) >= CLAIM_VISITS for cell in turn)
            if round_number > 0 and paired and elapsed_s + cost_s > plan.budget_s:
                continue
            if round_number > 0 and elapsed_s > plan.budget_s:
                return
            rest = [cell for later in turns[position:] for cell in later]
            for cell in turn:
                elapsed_s = machine.now_s() - start
                left_s = _left_s(rest, round_number, elapsed_s, plan, durations)
                on_progress(Progress(cell, round_number, elapsed_s, left_s, visits))
                state = seen[cell]
                reason = _larger_than_failed(cell, seen) or (fits(cell) if round_number == 0 else None)
                if reason:
                    state.gap = Gap(cell, "skipped", reason)
                    yield state.gap
                    continue
                before_s = machine.now_s()
                outcome = visit_safely(engines[cell.engine], cell, round_number, bench)
                durations[cell] = machine.now_s() - before_s
                visits += 1
                if isinstance(outcome, Gap):
                    state.gap = outcome
                else:
                    state.visits.append(outcome)
                yield outcome
        if visits == visits_before and round_number > 0:
            return


def _open_cells(seen: Mapping[Cell, _Seen], half_width: float, swing: float) -> list[Cell]:
    """Cells that need a further visit: while some were visited less than twice, only those."""
    spreads = {
        phase: spread_of((phase_medians(phase, state.visits) for state in seen.values()), swing) for phase in PHASES
    }
    found = [cell for cell, state in seen.items() if state.gap is None and not state.narrow(half_width, spreads)]
    return [cell for cell in found if len(seen[cell].visits) < CLAIM_VISITS] or found


def _turns(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells that differ by nothing but their engine, together."""
    turns: dict[Cell, list[Cell]] = {}
    for cell in cells:
        turns.setdefault(replace(cell, engine=""), []).append(cell)
    return list(turns.values())


def _larger_than_failed(cell: Cell, seen: Mapping[Cell, _Seen]) -> str | None:
    for other, state in seen.items():
        if (
            state.gap is not None
            and state.gap.status == "oom"
            and cell != other
            and cell.engine == other.engine
            and cell.batch_size >= other.batch_size
            and cell.depth >= other.depth
        ):
            return f"larger than batch {other.batch_size} x {other.depth} tokens, which ran out of memory"
    return None


def _cost(cell: Cell, plan: Plan, durations: Mapping[Cell, float]) -> float:
    """Expected seconds of a visit: the last one's, else the plan's figure scaled by what visits cost so far."""
    if cell in durations:
        return durations[cell]
    known = [other for other in durations if plan.expected_s.get(other)]
    scale = sum(durations[c] for c in known) / sum(plan.expected_s[c] for c in known) if known else 1.0
    return scale * plan.expected_s.get(cell, 0.0)


def _left_s(
    rest: list[Cell], round_number: int, elapsed_s: float, plan: Plan, durations: Mapping[Cell, float]
) -> float:
    this_round_s = sum(_cost(cell, plan, durations) for cell in rest)
    if round_number == 0:
        # A first visit warms its shape up as well; the rounds behind it run to the budget or end early.
        return max(this_round_s, plan.budget_s - elapsed_s)
    return max(0.0, plan.budget_s - elapsed_s)
