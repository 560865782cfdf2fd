"""Which cells a sweep visits next, until intervals are narrow or the time is spent, and how long each may take."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from profiler.effort import STANDARD, Effort
from profiler.facts.visits import Gap, Visit, phase_medians, phase_samples
from profiler.grid.cells import PHASES, Cell, CellKey, Grid, Phase
from profiler.stats import (
    CLAIM_VISITS,
    LEAST_SAMPLES,
    LEAST_VISITS,
    TARGET_HALF_WIDTH,
    VisitSpread,
    estimate,
    narrow_enough,
    samples_for,
    spread_of,
)

_SEED = 0
MORE_PREFILLS = LEAST_SAMPLES - 1
TAIL_PREFILLS = samples_for(95)
"""Prefills with which the time to first token has its 95th percentile."""


@dataclass(frozen=True)
class Progress:
    """The state of the sweep before a visit."""

    cell: Cell
    visit: int
    """The number of this visit of the cell, from 1."""
    elapsed_s: float
    left_s: float
    """Seconds to the end: what the budget leaves, or the expected time of a whole grid's visits."""


@dataclass(frozen=True)
class Plan:
    """What to sweep, and when it is enough."""

    grid: Grid
    budget_s: float
    whole: bool = False
    """Whether every cell is visited twice, whatever the budget."""
    half_width: float = TARGET_HALF_WIDTH
    """Target half-width of the 95 % interval, as a share of the median."""
    expected_s: Mapping[CellKey, float] = field(default_factory=dict)
    """Expected seconds of each prefill and step, until it is measured."""
    first_use: float = 0.0
    """Seconds of a step at a new length over those of a timed one, on a GPU, whose first visit makes each step once
    before it is timed."""
    new_shape_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that an engine takes to prepare each new shape, such as for compiling it."""
    late_s: float = math.inf
    """Seconds beyond the budget at which the current visit is given up."""
    tail_s: float = 0.0
    """Seconds that `TAIL_PREFILLS` of a cell of the answer may take; longer ones are not added."""
    effort: Effort = STANDARD
    ascending: bool = False
    """Whether each size has its first visit before any has a second, from the smallest on: a slope needs neighbours."""

    @cached_property
    def _answered(self) -> list[tuple[int, int]]:
        """Batch and prompt length of the cells of the answer: the smallest, and the largest prefill."""
        prompts = [(cell.batch_size, cell.prompt_len) for cell in self.grid.cells if cell.prompt_len]
        return prompts[:1] + prompts[-1:]

    def tail_s_of(self, cell: Cell) -> float:
        """Return `tail_s` for a cell of the answer, with any engine; 0 for others."""
        return self.tail_s if (cell.batch_size, cell.prompt_len) in self._answered else 0.0


@dataclass
class CellState:
    """The visits of a cell so far, or the reason why it has none."""

    visits: list[Visit] = field(default_factory=list)
    gap: Gap | None = None
    has_failed: bool = False

    def fail(self, gap: Gap) -> None:
        """Record a visit without a number. A failure after an earlier visit may pass: the cell is visited once more."""
        if not self.visits or self.has_failed or gap.status != "failed":
            self.gap = gap
        self.has_failed = True

    def narrow(self, half_width: float, spreads: Mapping[Phase, VisitSpread]) -> bool:
        if len(self.visits) < LEAST_VISITS:
            return False
        samples = {key.phase: phase_samples(key.phase, self.visits) for key in self.visits[0].cell.keys}
        return all(
            narrow_enough(estimate(times, spreads[phase]), len(times), half_width) for phase, times in samples.items()
        )


def expected_sweep_s(plan: Plan) -> float:
    """Return the expected seconds of two visits of each cell."""
    states = {cell: CellState() for cell in plan.grid.cells}
    return Rounds(plan, states, Costs(plan)).left_s


class Rounds:
    """Decides which cells are visited together next."""

    def __init__(self, plan: Plan, states: Mapping[Cell, CellState], costs: Costs) -> None:
        self._plan = plan
        self._states = states
        self._costs = costs
        self._shuffle = random.Random(_SEED)
        self._all_twice = plan.whole or self.left_s <= plan.budget_s

    def following(self, left_s: float, swing: float) -> tuple[list[list[Cell]], bool] | None:
        """The turns of the next round, and whether they run whatever they take; None if there is none left."""
        for cells, least in self._stages:
            if turns := self._waiting(cells, least):
                if self._plan.whole:
                    return self._in_order(turns), True
                if turns := self._affordable(turns, left_s, least):
                    return self._in_order(turns), False
        states = self._states
        medians = {phase: [phase_medians(phase, state.visits) for state in states.values()] for phase in PHASES}
        spreads = {phase: spread_of(of_cells, swing) for phase, of_cells in medians.items()}
        open_cells = [cell for cell, state in states.items() if state.gap is None and not self._is_done(state, spreads)]
        if turns := _cheapest(_turns(open_cells), self._costs, left_s):
            return self._in_order(turns), False
        return None

    def _is_done(self, state: CellState, spreads: Mapping[Phase, VisitSpread]) -> bool:
        return len(state.visits) >= self._plan.effort.rounds or state.narrow(self._plan.half_width, spreads)

    def smallest(self) -> list[list[Cell]]:
        """The smallest turn, in a list."""
        open_turns = self._waiting(list(self._states), self._plan.effort.rounds)
        return sorted(open_turns, key=_size)[:1]

    @property
    def left_s(self) -> float:
        """Expected seconds of the remaining visits of a whole grid."""
        times = min(CLAIM_VISITS, self._plan.effort.rounds)
        return sum(
            self._costs.of(cell, len(state.visits) + number, tail=True)
            for cell, state in self._states.items()
            if state.gap is None
            for number in range(times - len(state.visits))
        )

    @property
    def _stages(self) -> Iterator[tuple[Sequence[Cell], int]]:
        """Cells, and the visits that each of them needs before the next stage.

        Where not all cells can have two visits, the corners have theirs first.
        """
        everything = list(self._states)
        groups = (everything,) if self._plan.ascending else (corners(everything), everything)
        times = range(1, min(CLAIM_VISITS, self._plan.effort.rounds) + 1)
        if self._all_twice:
            yield from ((cells, least) for least in times for cells in groups)
        else:
            yield from ((cells, least) for cells in groups for least in times)

    def _waiting(self, cells: Sequence[Cell], least: int) -> list[list[Cell]]:
        states = ((cell, self._states[cell]) for cell in cells)
        return _turns([cell for cell, state in states if state.gap is None and len(state.visits) < least])

    def _affordable(self, turns: list[list[Cell]], left_s: float, least: int) -> list[list[Cell]]:
        """Turns that fit into the time each by itself; for a second visit, as many as fit together."""
        if least > 1:
            return _cheapest(turns, self._costs, left_s)
        return [turn for turn in turns if self._costs.of_all(turn) <= left_s]

    def _in_order(self, turns: list[list[Cell]]) -> list[list[Cell]]:
        visits = len(self._states[turns[0][0]].visits)
        if visits < CLAIM_VISITS:
            turns = sorted(turns, key=_size)  # in one order, so that other cells are between two visits of a cell
        else:
            self._shuffle.shuffle(turns)
        return [turn[:: -1 if len(self._states[turn[0]].visits) % 2 else 1] for turn in turns]


def further_prefills(prefill_s: float, most_s: float, tail_s: float, *, first: bool) -> int:
    """Return how many prefills a visit adds to its own: as many as fit into `most_s`, but at most `MORE_PREFILLS`.

    The first visit of a cell adds at least one, so that two visits have three. If `TAIL_PREFILLS` fit into `tail_s`, it
    adds so many that two visits have them.
    """
    if TAIL_PREFILLS * prefill_s <= tail_s:
        return max(MORE_PREFILLS, TAIL_PREFILLS // CLAIM_VISITS - 1)
    return max(int(first), min(MORE_PREFILLS, int(most_s / prefill_s)))


def corners(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of the smallest and the largest batch with the shortest and the longest prompt or cache."""
    corner_cells = []
    for by_prompt in (True, False):
        same_kind = [cell for cell in cells if bool(cell.prompt_len) == by_prompt]
        batches, depths = {cell.batch_size for cell in same_kind}, {cell.depth for cell in same_kind}
        if same_kind:
            ends = {min(batches), max(batches)}, {min(depths), max(depths)}
            corner_cells += [cell for cell in same_kind if cell.batch_size in ends[0] and cell.depth in ends[1]]
    return corner_cells


def _size(turn: Sequence[Cell]) -> int:
    """Tokens in a turn's cells. Their cost is no order: on a busy machine, only the first batch's dispatch is known."""
    return turn[0].batch_size * turn[0].depth


def _turns(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells grouped into turns: those that differ only in their engine."""
    turns: dict[Cell, list[Cell]] = {}
    for cell in cells:
        turns.setdefault(replace(cell, engine=""), []).append(cell)
    return list(turns.values())


def _cheapest(turns: list[list[Cell]], costs: Costs, left_s: float) -> list[list[Cell]]:
    """The cheapest turns that fit into `left_s` seconds together."""
    cheapest = sorted(turns, key=costs.of_all)
    total_s = itertools.accumulate(costs.of_all(turn) for turn in cheapest)
    return [turn for turn, cost_s in zip(cheapest, total_s, strict=True) if cost_s <= left_s]


class Costs:
    """Expected seconds of a visit of each cell: as long as its last one, or as its prefill and steps are expected."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._last_s: dict[Cell, float] = {}
        self._over_expected: dict[Phase, float] = dict.fromkeys(PHASES, 1.0)
        self._first_use = plan.first_use

    def of(self, cell: Cell, visit: int = 0, *, tail: bool = False) -> float:
        """Seconds of the visit with this number, from 0; the first one also warms its shape up.

        With `tail`, a cell of the answer has its further prefills, which are left out if there is no time for them.
        """
        if cell in self._last_s:
            return self._last_s[cell]
        plan, seconds = self._plan, 0.0 if visit else self._plan.new_shape_s.get(cell.engine, 0.0)
        for key in cell.keys:
            once_s = plan.expected_s.get(key, 0.0) * self._over_expected[key.phase]
            if key.phase == "decode":
                seconds += once_s * cell.decode_steps * (1 if visit else 1 + self._first_use)
            elif once_s:
                warm_ups = 0 if visit else 1 if once_s > plan.effort.warm_up_s else 2
                tail_s = plan.tail_s_of(cell) if tail and visit < CLAIM_VISITS else 0.0
                more = further_prefills(once_s, plan.effort.more_prefills_s, tail_s, first=not visit)
                seconds += once_s * (1 + warm_ups + more)
        return seconds

    def of_all(self, cells: Iterable[Cell]) -> float:
        return sum(map(self.of, cells))

    def note(self, cell: Cell, seconds: float, outcome: Visit | Gap | None) -> None:
        """Record how long a visit took."""
        if not isinstance(outcome, Visit):
            return
        self._last_s[cell] = seconds - sum(outcome.warm_up_s) - sum(outcome.first_decode_s)
        if outcome.first_decode_s:
            self._first_use = sum(outcome.first_decode_s) / sum(outcome.decode_s)
        for key in cell.keys:
            medians, expected_s = phase_medians(key.phase, [outcome]), self._plan.expected_s.get(key, 0.0)
            if medians and expected_s:
                self._over_expected[key.phase] = medians[outcome.round] / expected_s
