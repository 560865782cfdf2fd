"""The sweep: visit cells in interleaved rounds until intervals are narrow or the time is spent."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from profiler.device.machine import Machine
from profiler.effort import STANDARD, Effort
from profiler.engines.base import Engine
from profiler.facts.visits import Gap, Visit, phase_medians, phase_samples
from profiler.grid.cells import PHASES, Cell, Grid, Phase
from profiler.measure.visit import VisitContext, visit_safely
from profiler.stats import (
    CLAIM_VISITS,
    LEAST_VISITS,
    TARGET_HALF_WIDTH,
    VisitSpread,
    estimate,
    narrow_enough,
    spread_of,
)

_SEED = 0


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
    effort: Effort = STANDARD


@dataclass
class _Seen:
    """What is known of a cell so far."""

    visits: list[Visit] = field(default_factory=list)
    gap: Gap | None = None

    def narrow(self, half_width: float, spreads: Mapping[Phase, VisitSpread]) -> bool:
        if len(self.visits) < LEAST_VISITS:
            return False
        samples = {key.phase: phase_samples(key.phase, self.visits) for key in self.visits[0].cell.keys}
        return all(
            narrow_enough(estimate(times, spreads[phase]), len(times), half_width) for phase, times in samples.items()
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
    always finished; later rounds are shuffled (seeded), visit only cells whose interval is still wide, and keep to the
    budget: where it is not enough for a whole round, the cheapest cells have it. No cell is visited a third time before
    all that the budget is enough for have had their second, which is what tells how far visits lie apart; engines are
    visited in turn, a cell's one right after the other. `on_round` is called before each round
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
    bench = VisitContext(machine, vocab_size, own_bytes or {}, effort=plan.effort)
    shuffle = random.Random(_SEED)
    start = machine.now_s()
    costs = _Costs(plan.expected_s)
    visits, swing = 0, 0.0
    no_memory = [cell for cell, state in seen.items() if state.gap is not None and state.gap.status == "oom"]
    for round_number in range(plan.effort.rounds):
        open_cells = _open_cells(seen, plan.half_width, swing)
        turns = _turns([cell for cell in open_cells if round_number > 0 or not seen[cell].visits])
        if round_number > 0:
            if not turns:
                return
            left_s = plan.budget_s - (machine.now_s() - start)
            once = [turn for turn in turns if any(len(seen[cell].visits) < CLAIM_VISITS for cell in turn)]
            turns = _affordable(once, costs, left_s) or _affordable(turns, costs, left_s)
            shuffle.shuffle(turns)
            turns = [turn[:: -1 if round_number % 2 else 1] for turn in turns]
        swing = on_round()
        visits_before = visits
        unseen_s = sum(costs.expected_s.get(cell, 0.0) for turn in turns for cell in turn) if round_number == 0 else 0.0
        for turn in turns:
            elapsed_s = machine.now_s() - start
            if round_number > 0 and elapsed_s + costs.of_all(turn) > plan.budget_s:
                continue
            for cell in turn:
                elapsed_s = machine.now_s() - start
                # A first visit warms its shape up as well; the rounds behind it run to the budget or end early.
                left_s = max(0.0, costs.scale * unseen_s, plan.budget_s - elapsed_s)
                unseen_s -= costs.expected_s.get(cell, 0.0)
                on_progress(Progress(cell, round_number, elapsed_s, left_s, visits))
                state = seen[cell]
                reason = _larger_than_failed(cell, no_memory) or (fits(cell) if round_number == 0 else None)
                if reason:
                    state.gap = Gap(cell, "skipped", reason)
                    yield state.gap
                    continue
                before_s = machine.now_s()
                outcome = visit_safely(engines[cell.engine], cell, round_number, bench)
                costs.note(cell, machine.now_s() - before_s)
                visits += 1
                if isinstance(outcome, Gap):
                    state.gap = outcome
                    no_memory += [cell] if outcome.status == "oom" else []
                else:
                    state.visits.append(outcome)
                yield outcome
        if visits == visits_before and round_number > 0:
            return


def _open_cells(seen: Mapping[Cell, _Seen], half_width: float, swing: float) -> list[Cell]:
    """Cells that need a further visit."""
    spreads = {
        phase: spread_of((phase_medians(phase, state.visits) for state in seen.values()), swing) for phase in PHASES
    }
    return [cell for cell, state in seen.items() if state.gap is None and not state.narrow(half_width, spreads)]


def _turns(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells that differ by nothing but their engine, together."""
    turns: dict[Cell, list[Cell]] = {}
    for cell in cells:
        turns.setdefault(replace(cell, engine=""), []).append(cell)
    return list(turns.values())


def _affordable(turns: list[list[Cell]], costs: _Costs, left_s: float) -> list[list[Cell]]:
    """The cheapest turns that `left_s` seconds are enough for."""
    cheapest = sorted(turns, key=costs.of_all)
    together_s = itertools.accumulate(costs.of_all(turn) for turn in cheapest)
    return [turn for turn, cost_s in zip(cheapest, together_s, strict=True) if cost_s <= left_s]


def _larger_than_failed(cell: Cell, no_memory: Iterable[Cell]) -> str | None:
    for other in no_memory:
        if (
            cell != other
            and cell.engine == other.engine
            and cell.batch_size >= other.batch_size
            and cell.depth >= other.depth
        ):
            return f"larger than batch {other.batch_size} x {other.depth} tokens, which ran out of memory"
    return None


class _Costs:
    """Seconds that a visit of each cell is expected to take: as long as its last one, else as planned, scaled by what
    visits cost so far."""

    def __init__(self, expected_s: Mapping[Cell, float]) -> None:
        self.expected_s = expected_s
        self._durations: dict[Cell, float] = {}
        self._took_s = self._planned_s = 0.0

    @property
    def scale(self) -> float:
        """What visits cost over what was planned for them."""
        return self._took_s / self._planned_s if self._planned_s else 1.0

    def of(self, cell: Cell) -> float:
        return self._durations.get(cell, self.scale * self.expected_s.get(cell, 0.0))

    def of_all(self, cells: Iterable[Cell]) -> float:
        return sum(map(self.of, cells))

    def note(self, cell: Cell, seconds: float) -> None:
        """A visit took so long."""
        if planned_s := self.expected_s.get(cell, 0.0):
            self._took_s += seconds - self._durations.get(cell, 0.0)
            self._planned_s += 0.0 if cell in self._durations else planned_s
        self._durations[cell] = seconds
