"""The repetitions of a sweep until intervals are narrow or time is up: their order, their limits, and their cost."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from profiler.effort import STANDARD, Effort
from profiler.facts.repetitions import Gap, Repetition, phase_medians, phase_samples, repetition_spreads
from profiler.grid.cells import PHASES, Cell, CellKey, Grid, Phase, extremes
from profiler.stats import (
    CLAIM_REPETITIONS,
    LEAST_REPETITIONS,
    LEAST_SAMPLES,
    RepetitionSpread,
    estimate,
    narrow_enough,
    samples_for,
)

_SEED = 0
MORE_PREFILLS = LEAST_SAMPLES - 1
TAIL_PREFILLS = samples_for(95)
"""Prefills with which the time to first token has its 95th percentile."""


@dataclass(frozen=True)
class Progress:
    """The state of the sweep before a repetition."""

    cell: Cell
    repetition: int
    """The number of this repetition of the cell, from 1."""
    elapsed_s: float
    left_s: float
    """Seconds to the end: what the budget leaves, or the expected time of a whole grid's repetitions."""


@dataclass(frozen=True)
class Limits:
    """How long a repetition may take."""

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
    """Whether every cell is timed twice, whatever the budget."""
    expected_s: Mapping[CellKey, float] = field(default_factory=dict)
    """Expected seconds of each prefill and step, until it is measured."""
    first_use: float = 0.0
    """On a GPU, whose first repetition makes each step once untimed: the seconds of that over those of a timed one."""
    new_shape_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that an engine takes to prepare each new shape, such as for compiling it."""
    late_s: float = math.inf
    """Seconds beyond the budget at which the current repetition is given up."""
    tail_s: float = 0.0
    """Seconds that `TAIL_PREFILLS` of a cell of the answer may take; longer ones are not added."""
    effort: Effort = STANDARD
    ascending: bool = False
    """Whether all sizes have one repetition, from the smallest on, before any has two: a slope needs neighbours."""

    @property
    def claim_repetitions(self) -> int:
        """Repetitions that a claim needs, as far as the effort allows them."""
        return min(CLAIM_REPETITIONS, self.effort.rounds)

    @cached_property
    def _answered(self) -> list[tuple[int, int]]:
        """Batch and prompt length of the cells of the answer: the smallest, and the largest prefill."""
        prompts = extremes(cell for cell in self.grid.cells if cell.prompt_len)
        return [(cell.batch_size, cell.prompt_len) for cell in prompts]

    def tail_s_of(self, cell: Cell) -> float:
        """Return `tail_s` for a cell of the answer, with any engine; 0 for others."""
        return self.tail_s if (cell.batch_size, cell.prompt_len) in self._answered else 0.0


@dataclass
class CellState:
    """The repetitions of a cell so far, or the reason why it has none."""

    repetitions: list[Repetition] = field(default_factory=list)
    gap: Gap | None = None
    has_failed: bool = False

    def is_narrow(self, spreads: Mapping[Phase, RepetitionSpread]) -> bool:
        if len(self.repetitions) < LEAST_REPETITIONS:
            return False
        phases = [key.phase for key in self.repetitions[0].cell.keys]
        timed = [(phase_samples(phase, self.repetitions), spreads[phase]) for phase in phases]
        return all(narrow_enough(estimate(times, spread), len(times)) for times, spread in timed)


Turn = list[Cell]
"""Cells that differ only in their engine: they are timed one right after the other."""


@dataclass
class Schedule:
    """The cells of a sweep in the order of their repetitions; `note` says how each repetition ended.

    The corners of the grid come first, then the other cells. If that is expected to fit, second repetitions follow
    after all first ones, so that they lie apart in time; otherwise the corners have theirs first. Further repetitions
    are made where the interval is still wide, in shuffled rounds (seeded). The engines of a cell are timed one right
    after the other, every second time in reverse.

    A repetition is due only if it is expected to end within the budget. The smallest cell is timed in any case. In a
    `whole` plan all cells first get two repetitions, however long they take. A cell that fails after an earlier
    repetition is timed once more. One that is larger than a cell without memory is not.
    """

    plan: Plan
    now_s: Callable[[], float] = lambda: 0.0
    look: Callable[[], float] = lambda: 0.0
    """Called before each turn; returns how much the machine's own speed has varied so far."""
    fits: Callable[[Cell], str | None] = lambda cell: None
    """Returns why a cell cannot fit, or None."""
    earlier: Iterable[Repetition | Gap] = ()
    """The outcomes of an interrupted sweep."""

    def __post_init__(self) -> None:
        self._start_s = self.now_s()
        self._states = {cell: CellState() for cell in self.plan.grid.cells}
        self.round = 0
        for outcome in self.earlier:
            if isinstance(outcome, Gap):
                self._states[outcome.cell].gap = outcome
            else:
                self._states[outcome.cell].repetitions.append(outcome)
                self.round = max(self.round, outcome.round + 1)
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
                if not is_bounded or self._least_s(turn) <= self._left_s:
                    yield from turn
            self.round += 1

    def progress(self, cell: Cell) -> Progress:
        left_s = max(self.whole_grid_s if self.plan.whole else 0.0, self._left_s)
        return Progress(cell, len(self._states[cell].repetitions) + 1, self.now_s() - self._start_s, left_s)

    def limits(self, cell: Cell) -> Limits:
        """Return the limits of this cell's next repetition: the very first one hurries, and is not given up."""
        plan, state, end_s = self.plan, self._states[cell], self._start_s + self.plan.budget_s
        prefills = sum(len(repetition.prefills_s) for repetition in state.repetitions)
        has_time = plan.whole or self._costs.of(cell, len(state.repetitions), tail=True) <= self._left_s
        limits = Limits(
            tail_s=plan.tail_s_of(cell) if prefills < TAIL_PREFILLS and has_time else 0.0, effort=plan.effort
        )
        if not plan.whole and self.whole_grid_s > self._left_s:
            limits = Limits(effort=replace(plan.effort, more_prefills_s=0.0))
        if plan.whole or plan.late_s == math.inf:
            return limits
        if self._has_repetitions:
            return replace(limits, deadline_s=end_s + plan.late_s)
        return replace(limits, hurry_s=end_s)

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
        return None if self._states[cell].repetitions else self.fits(cell)

    def note(self, outcome: Repetition | Gap, seconds: float) -> None:
        """Record how a repetition ended, and how long it took."""
        state = self._states[outcome.cell]
        if isinstance(outcome, Repetition):
            state.repetitions.append(outcome)
            self._costs.note(outcome, seconds)
            return
        # A failure after an earlier repetition may pass: the cell is timed once more.
        if not state.repetitions or state.has_failed or outcome.status != "failed":
            state.gap = outcome
        state.has_failed = True

    def pause(self, seconds: float) -> None:
        """Leave out time that was spent on something else."""
        self._start_s += seconds

    @property
    def whole_grid_s(self) -> float:
        """Expected seconds of the repetitions that are left until each cell has two."""
        return sum(
            self._costs.of(cell, len(state.repetitions) + number, tail=True)
            for cell, state in self._states.items()
            if state.gap is None
            for number in range(self.plan.claim_repetitions - len(state.repetitions))
        )

    @property
    def _left_s(self) -> float:
        return self._start_s + self.plan.budget_s - self.now_s()

    @property
    def _has_repetitions(self) -> bool:
        return any(state.repetitions for state in self._states.values())

    def _next_turns(self) -> tuple[list[Turn], bool]:
        """The turns of the next round, none at the end, and whether only those run for which there is time."""
        for cells, least in self._stages:
            turns = self._waiting(cells, least)
            if not self.plan.whole and least == 1:
                turns = [turn for turn in turns if self._least_s(turn) <= self._left_s]
            elif not self.plan.whole:
                turns = self._cheapest(turns)
            if turns:
                return self._in_order(turns), not self.plan.whole
        if not self._has_repetitions:
            return sorted(self._waiting(list(self._states), 1), key=_size)[:1], False
        turns = self._cheapest(self._wide_turns())
        return self._in_order(turns) if turns else [], True

    @property
    def _stages(self) -> Iterator[tuple[Sequence[Cell], int]]:
        """Cells, and the repetitions that each of them needs before the next stage."""
        everything = list(self._states)
        groups = (everything,) if self.plan.ascending else (corners(everything), everything)
        times = range(1, self.plan.claim_repetitions + 1)
        if self._all_twice:
            yield from ((cells, least) for least in times for cells in groups)
        else:
            yield from ((cells, least) for cells in groups for least in times)

    def _waiting(self, cells: Sequence[Cell], least: int) -> list[Turn]:
        states = ((cell, self._states[cell]) for cell in cells)
        return _turns(cell for cell, state in states if state.gap is None and len(state.repetitions) < least)

    def _wide_turns(self) -> list[Turn]:
        plan, states = self.plan, self._states
        repetitions = {cell: state.repetitions for cell, state in states.items()}
        spreads = repetition_spreads([key for cell in states for key in cell.keys], repetitions, self._swing)
        open_cells = itertools.chain.from_iterable(self._waiting(list(states), plan.effort.rounds))
        return _turns(cell for cell in open_cells if not states[cell].is_narrow(spreads))

    def _cheapest(self, turns: list[Turn]) -> list[Turn]:
        """The cheapest turns that fit into the time left together."""
        cheapest, left_s = sorted(turns, key=self._least_s), self._left_s
        total_s = itertools.accumulate(self._least_s(turn) for turn in cheapest)
        return [turn for turn, cost_s in zip(cheapest, total_s, strict=True) if cost_s <= left_s]

    def _least_s(self, turn: Turn) -> float:
        """Expected seconds of a turn; without the further prefills of a cell that has too few repetitions yet."""
        counts = {cell: len(self._states[cell].repetitions) for cell in turn}
        due = self.plan.claim_repetitions
        return sum(self._costs.of(cell, count, least=count < due) for cell, count in counts.items())

    def _in_order(self, turns: list[Turn]) -> list[Turn]:
        if len(self._states[turns[0][0]].repetitions) < CLAIM_REPETITIONS:
            turns = sorted(turns, key=_size)  # in one order, so that other cells are between two repetitions of a cell
        else:
            self._shuffle.shuffle(turns)
        return [turn[:: -1 if len(self._states[turn[0]].repetitions) % 2 else 1] for turn in turns]


def further_prefills(prefill_s: float, limits: Limits, *, first: bool) -> int:
    """Return how many prefills a repetition adds to its own: as many as its limits allow, but at most `MORE_PREFILLS`.

    The first repetition of a cell adds at least one, so that two repetitions have three. If `TAIL_PREFILLS` fit into
    `limits.tail_s`, it adds so many that two repetitions have them.
    """
    if TAIL_PREFILLS * prefill_s <= limits.tail_s:
        return max(MORE_PREFILLS, TAIL_PREFILLS // CLAIM_REPETITIONS - 1)
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
    """Tokens in a turn's cells. Their cost is no order: on a busy machine, only the first batch's overhead is known."""
    return turn[0].batch_size * turn[0].depth


def _turns(cells: Iterable[Cell]) -> list[Turn]:
    turns: dict[Cell, Turn] = {}
    for cell in cells:
        turns.setdefault(replace(cell, engine=""), []).append(cell)
    return list(turns.values())


class Costs:
    """Expected seconds of each cell's repetition: those of its last one, or what its prefill and steps should take."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._last: dict[Cell, Repetition] = {}
        self._last_s: dict[Cell, float] = {}
        self._over_expected: dict[Phase, float] = dict.fromkeys(PHASES, 1.0)
        self._first_use = plan.first_use

    def of(self, cell: Cell, repetition: int = 0, *, tail: bool = False, least: bool = False) -> float:
        """Seconds of the repetition with this number, from 0; the first one also warms its shape up.

        With `tail`, a cell of the answer has its further prefills, which are left out if there is no time for them.
        With `least`, a cell has as few prefills as it needs.
        """
        plan, last = self._plan, self._last.get(cell)
        expected_s = {key.phase: plan.expected_s.get(key, 0.0) * self._over_expected[key.phase] for key in cell.keys}
        prefill_s = (last and last.prefill_s) or expected_s.get("prefill", 0.0)
        if last:
            seconds = self._last_s[cell]
        else:
            warm_ups = 0 if repetition else 1 if prefill_s > plan.effort.warm_up_s else 2
            loops = 1 if repetition else 1 + self._first_use
            seconds = (1 + warm_ups) * prefill_s + loops * cell.decode_steps * expected_s.get("decode", 0.0)
            seconds += 0.0 if repetition else plan.new_shape_s.get(cell.engine, 0.0)
        if least or not prefill_s:
            return seconds + int(not repetition) * prefill_s
        limits = Limits(
            tail_s=plan.tail_s_of(cell) if tail and repetition < CLAIM_REPETITIONS else 0.0, effort=plan.effort
        )
        return seconds + further_prefills(prefill_s, limits, first=not repetition) * prefill_s

    def note(self, repetition: Repetition, seconds: float) -> None:
        """Record how long a repetition took."""
        cell = repetition.cell
        untimed_s = sum((*repetition.warm_up_s, *repetition.first_decode_s))
        self._last[cell], self._last_s[cell] = repetition, seconds - untimed_s - sum(repetition.more_prefill_s)
        if repetition.first_decode_s:
            self._first_use = sum(repetition.first_decode_s) / sum(repetition.decode_s)
        for key in cell.keys:
            medians, expected_s = phase_medians(key.phase, [repetition]), self._plan.expected_s.get(key, 0.0)
            if medians and expected_s:
                self._over_expected[key.phase] = medians[repetition.round] / expected_s
