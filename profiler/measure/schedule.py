"""The visits of a sweep: their order, their limits, and what they cost, until intervals are narrow or time is up."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
class Limits:
    """How long a visit may take."""

    deadline_s: float = math.inf
    """The machine's time after which it is given up between two steps."""
    hurry_s: float = math.inf
    """The machine's time after which it does the minimum: one prefill to warm up, and few steps."""
    tail_s: float = 0.0
    """Seconds that the prefills may take that give the time to first token its 95th percentile; 0: none are added."""
    effort: Effort = STANDARD


UNLIMITED = Limits()


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

    @property
    def claim_visits(self) -> int:
        """Visits that a claim needs, as far as the effort allows them."""
        return min(CLAIM_VISITS, self.effort.rounds)

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


Turn = list[Cell]
"""Cells that differ only in their engine: they are visited one right after the other."""


@dataclass
class Schedule:
    """The cells of a sweep in the order of their visits; `note` says how each visit ended.

    The corners of the grid come first, then the other cells. If that is expected to fit, second visits follow after all
    first ones, so that they lie apart in time; otherwise the corners have theirs first. Further visits are made where
    the interval is still wide, in shuffled rounds (seeded). The engines of a cell are visited one right after the
    other, every second time in reverse.

    A visit is due only if it is expected to end within the budget. The smallest cell is visited in any case. In a
    `whole` plan all cells first get two visits, however long they take. A cell that fails after an earlier visit is
    visited once more. One that is larger than a cell without memory is not.
    """

    plan: Plan
    now_s: Callable[[], float] = lambda: 0.0
    look: Callable[[], float] = lambda: 0.0
    """Called before each turn; returns how much the machine's own speed has varied so far."""
    fits: Callable[[Cell], str | None] = lambda cell: None
    """Returns why a cell cannot fit, or None."""
    earlier: Iterable[Visit | Gap] = ()
    """The outcomes of an interrupted sweep."""

    def __post_init__(self) -> None:
        self._start_s = self.now_s()
        self._states = {cell: CellState() for cell in self.plan.grid.cells}
        for outcome in self.earlier:
            if isinstance(outcome, Gap):
                self._states[outcome.cell].gap = outcome
            else:
                self._states[outcome.cell].visits.append(outcome)
        self.round = 1 + max((visit.round for state in self._states.values() for visit in state.visits), default=-1)
        self._costs = Costs(self.plan)
        self._swing = 0.0
        self._shuffle = random.Random(_SEED)
        self._all_twice = self.plan.whole or self.whole_grid_s <= self.plan.budget_s

    def __iter__(self) -> Iterator[Cell]:
        while True:
            turns, is_bounded = self._next_turns()
            if not turns:
                return
            for turn in turns:
                self._swing = self.look()
                if not is_bounded or self._costs.of_all(turn) <= self._left_s:
                    yield from turn
            self.round += 1

    def progress(self, cell: Cell) -> Progress:
        """Return the state of the sweep before a visit of this cell."""
        left_s = max(self.whole_grid_s if self.plan.whole else 0.0, self._left_s)
        return Progress(cell, len(self._states[cell].visits) + 1, self.now_s() - self._start_s, left_s)

    def limits(self, cell: Cell) -> Limits:
        """Return the limits of this cell's next visit: the very first one hurries, and is not given up."""
        plan, state, end_s = self.plan, self._states[cell], self._start_s + self.plan.budget_s
        prefills = sum(len(visit.prefills_s) for visit in state.visits)
        has_time = plan.whole or self._costs.of(cell, len(state.visits), tail=True) <= self._left_s
        tail_s = plan.tail_s_of(cell) if prefills < TAIL_PREFILLS and has_time else 0.0
        limits = Limits(tail_s=tail_s, effort=plan.effort)
        if plan.whole or plan.late_s == math.inf:
            return limits
        return replace(limits, deadline_s=end_s + plan.late_s) if self._has_visits else replace(limits, hurry_s=end_s)

    def skip_reason(self, cell: Cell) -> str | None:
        """Return why a cell is not tried: it does not fit, or is at least as large as one without memory; else None."""
        for other in (other for other, state in self._states.items() if state.gap and state.gap.status == "oom"):
            if (
                cell.engine == other.engine
                and cell.batch_size >= other.batch_size
                and cell.depth >= other.depth
                and cell.prefilled >= other.prefilled
            ):
                return f"larger than batch {other.batch_size} x {other.depth} tokens, which ran out of memory"
        return None if self._states[cell].visits else self.fits(cell)

    def note(self, outcome: Visit | Gap, seconds: float) -> None:
        """Record how a visit ended, and how long it took."""
        state = self._states[outcome.cell]
        if isinstance(outcome, Gap):
            state.fail(outcome)
        else:
            state.visits.append(outcome)
            self._costs.note(outcome, seconds)

    def pause(self, seconds: float) -> None:
        """Leave out time that was spent on something else."""
        self._start_s += seconds

    @property
    def whole_grid_s(self) -> float:
        """Expected seconds of the visits that are left until each cell has two."""
        return sum(
            self._costs.of(cell, len(state.visits) + number, tail=True)
            for cell, state in self._states.items()
            if state.gap is None
            for number in range(self.plan.claim_visits - len(state.visits))
        )

    @property
    def _left_s(self) -> float:
        return self._start_s + self.plan.budget_s - self.now_s()

    @property
    def _has_visits(self) -> bool:
        return any(state.visits for state in self._states.values())

    def _next_turns(self) -> tuple[list[Turn], bool]:
        """The turns of the next round, none at the end, and whether only those run for which there is time."""
        for cells, least in self._stages:
            turns = self._waiting(cells, least)
            if not self.plan.whole and least == 1:
                turns = [turn for turn in turns if self._costs.of_all(turn) <= self._left_s]
            elif not self.plan.whole:
                turns = self._cheapest(turns)
            if turns:
                return self._in_order(turns), not self.plan.whole
        if not self._has_visits:
            return sorted(self._waiting(list(self._states), 1), key=_size)[:1], False
        turns = self._cheapest(self._wide_turns())
        return self._in_order(turns) if turns else [], True

    @property
    def _stages(self) -> Iterator[tuple[Sequence[Cell], int]]:
        """Cells, and the visits that each of them needs before the next stage."""
        everything = list(self._states)
        groups = (everything,) if self.plan.ascending else (corners(everything), everything)
        times = range(1, self.plan.claim_visits + 1)
        if self._all_twice:
            yield from ((cells, least) for least in times for cells in groups)
        else:
            yield from ((cells, least) for cells in groups for least in times)

    def _waiting(self, cells: Sequence[Cell], least: int) -> list[Turn]:
        states = ((cell, self._states[cell]) for cell in cells)
        return _turns(cell for cell, state in states if state.gap is None and len(state.visits) < least)

    def _wide_turns(self) -> list[Turn]:
        plan, states = self.plan, self._states
        medians = {phase: [phase_medians(phase, state.visits) for state in states.values()] for phase in PHASES}
        spreads = {phase: spread_of(of_cells, self._swing) for phase, of_cells in medians.items()}
        open_cells = itertools.chain.from_iterable(self._waiting(list(states), plan.effort.rounds))
        return _turns(cell for cell in open_cells if not states[cell].narrow(plan.half_width, spreads))

    def _cheapest(self, turns: list[Turn]) -> list[Turn]:
        """The cheapest turns that fit into the time left together."""
        cheapest, left_s = sorted(turns, key=self._costs.of_all), self._left_s
        total_s = itertools.accumulate(self._costs.of_all(turn) for turn in cheapest)
        return [turn for turn, cost_s in zip(cheapest, total_s, strict=True) if cost_s <= left_s]

    def _in_order(self, turns: list[Turn]) -> list[Turn]:
        if len(self._states[turns[0][0]].visits) < CLAIM_VISITS:
            turns = sorted(turns, key=_size)  # in one order, so that other cells are between two visits of a cell
        else:
            self._shuffle.shuffle(turns)
        return [turn[:: -1 if len(self._states[turn[0]].visits) % 2 else 1] for turn in turns]


def further_prefills(prefill_s: float, limits: Limits, *, first: bool) -> int:
    """Return how many prefills a visit adds to its own: as many as its limits allow, but at most `MORE_PREFILLS`.

    The first visit of a cell adds at least one, so that two visits have three. If `TAIL_PREFILLS` fit into
    `limits.tail_s`, it adds so many that two visits have them.
    """
    if TAIL_PREFILLS * prefill_s <= limits.tail_s:
        return max(MORE_PREFILLS, TAIL_PREFILLS // CLAIM_VISITS - 1)
    return max(int(first), min(MORE_PREFILLS, int(limits.effort.more_prefills_s / prefill_s)))


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


def _size(turn: Turn) -> int:
    """Tokens in a turn's cells. Their cost is no order: on a busy machine, only the first batch's dispatch is known."""
    return turn[0].batch_size * turn[0].depth


def _turns(cells: Iterable[Cell]) -> list[Turn]:
    turns: dict[Cell, Turn] = {}
    for cell in cells:
        turns.setdefault(replace(cell, engine=""), []).append(cell)
    return list(turns.values())


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
                more = further_prefills(once_s, Limits(tail_s=tail_s, effort=plan.effort), first=not visit)
                seconds += once_s * (1 + warm_ups + more)
        return seconds

    def of_all(self, cells: Iterable[Cell]) -> float:
        return sum(map(self.of, cells))

    def note(self, visit: Visit, seconds: float) -> None:
        """Record how long a visit took."""
        cell = visit.cell
        self._last_s[cell] = seconds - sum(visit.warm_up_s) - sum(visit.first_decode_s)
        if visit.first_decode_s:
            self._first_use = sum(visit.first_decode_s) / sum(visit.decode_s)
        for key in cell.keys:
            medians, expected_s = phase_medians(key.phase, [visit]), self._plan.expected_s.get(key, 0.0)
            if medians and expected_s:
                self._over_expected[key.phase] = medians[visit.round] / expected_s
