"""Doubling tests: measured slopes of time over size, next to those that bytes and FLOPs predict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from profiler.counting.floor import MOST, StepFloor, compute_bound_from, least, step_floor
from profiler.facts.ceilings import Ceilings
from profiler.facts.operators import OperatorWork
from profiler.grid.cells import CellKey, Phase
from profiler.json_document import view
from profiler.judge.cells import CellResult
from profiler.judge.difference import difference
from profiler.stats import CLAIM_REPETITIONS
from profiler.units import percent

Axis = Literal["batch", "prompt", "context"]
BoundSide = Literal["memory", "compute", "neither", "undecided"]

# The least difference of two predicted slopes with which a measured slope can decide between them.
_LEAST_DIFFERENCE = 0.25
# Below this slope a doubling has not yet reached the knee.
_KNEE_SLOPE = 0.5
# Rates that differ by less than this share are equal.
_AS_GOOD = 0.01


@dataclass(frozen=True)
class Doubling:
    """The change from one measured size to the next."""

    smaller: int
    larger: int
    slope: float
    """d log(time) / d log(size): 0 if the larger size takes no longer, 1 if time is proportional to the size."""
    low: float
    high: float
    """`low` and `high` are the ends of the slope's interval, from both times and the machine's drift between them."""
    bytes_slope: float
    """The slope if bytes determine the time."""
    flops_slope: float
    """The slope if FLOPs determine the time."""
    gain: float
    """Tokens/s of the larger size over those of the smaller."""
    side: BoundSide
    """The ceiling that the slope indicates.

    The time of a KV-dominated decode grows with the batch even if it is memory-bound. So a slope near 1 indicates
    nothing if both predictions are near 1."""


@dataclass(frozen=True)
class Scaling:
    """A series of sizes, with its doublings, best size and knee."""

    doublings: tuple[Doubling, ...]
    best: int
    """The smallest size whose tokens/s are within 1 % of the most."""
    largest: int
    """The largest measured size."""
    knee_measured: int | None
    """The size from which every doubling has a slope of at least 0.5 over its whole interval; None if the last one has
    not, or if it is uncertain."""
    knee_between: tuple[int, int] | None = None
    """The sizes between which the knee is, if the intervals do not determine it."""
    drift: float = 0.0
    """The machine's drift between neighbouring sizes, as a share."""
    rivals: tuple[int, ...] = ()
    """Sizes that may have more tokens/s than the best one, given the machine's drift between the repetitions of
    both."""


def scaling(cells: Sequence[CellResult], axis: Axis, drift: float = 0.0) -> Scaling:
    """Slopes between neighbouring sizes, the best size, and the knee. Raises ValueError for fewer than two sizes.

    `cells` are measured, one per size along `axis`. `drift` is the machine's drift over the run, as a share.
    Differences between sizes are no more certain than that, unless the sizes were timed in turn.
    """
    size = attrgetter(SIZE_OF[axis])
    ordered = sorted(cells, key=size)
    if len(ordered) < 2:
        raise ValueError("a slope needs two sizes or more")
    doublings = tuple(_doubling(smaller, larger, axis, drift) for smaller, larger in itertools.pairwise(ordered))
    knee, between = _knee(doublings)
    best = ordered[best_of([cell.tokens_per_s for cell in ordered])]
    return Scaling(
        doublings=doublings,
        best=size(best),
        largest=size(ordered[-1]),
        knee_measured=knee,
        knee_between=between,
        drift=max(_mutual_drift(smaller, larger, drift) for smaller, larger in itertools.pairwise(ordered)),
        rivals=tuple(
            size(cell)
            for cell in ordered
            if cell is not best
            and cell.tokens_per_s * (1 + _mutual_drift(cell, best, drift)) > (1 + _AS_GOOD) * best.tokens_per_s
        ),
    )


def _mutual_drift(one: CellResult, other: CellResult, drift: float) -> float:
    """The drift between the repetitions of two sizes; 0 if both were timed in the same number of shuffled rounds."""
    return 0.0 if (one.repetitions or 1) == (other.repetitions or 1) >= CLAIM_REPETITIONS else drift


def best_of(tokens_per_s: Sequence[float]) -> int:
    """The index of the smallest size, of ascending sizes, whose tokens/s are within 1 % of the most."""
    most = max(tokens_per_s)
    return next(index for index, each in enumerate(tokens_per_s) if each >= (1 - _AS_GOOD) * most)


def _knee(doublings: Sequence[Doubling]) -> tuple[int | None, tuple[int, int] | None]:
    """(knee, None), or (None, the sizes between which it is) if the slopes' intervals do not determine it."""
    flat = max((index for index, item in enumerate(doublings) if item.high < _KNEE_SLOPE), default=-1)
    steep = len(doublings)
    while steep > 0 and doublings[steep - 1].low >= _KNEE_SLOPE:
        steep -= 1
    knee = doublings[steep].smaller if steep < len(doublings) else None
    if flat == steep - 1:
        return knee, None
    return None, (doublings[flat + 1].smaller, knee or doublings[-1].larger)


def compute_bound_by_counts(by_size: Mapping[int, Sequence[OperatorWork]], ceilings: Ceilings) -> int | None:
    """The smallest size at which a step is compute-bound (`compute_bound_from`), from its operators at two or more.

    FLOPs and bytes are linear between neighbouring sizes, and beyond the last ones. Along the batch that is exact, but
    for the weights of experts: T tokens read E (1 - q^T) experts, where q follows from the least and the largest size.
    """
    sizes = np.array(sorted(by_size), dtype=np.float64)
    columns = list(zip(*(by_size[int(size)] for size in sizes), strict=True))
    flops = np.array([[item.flops for item in column] for column in columns], dtype=np.float64)
    nbytes = np.array([[item.model_bytes for item in column] for column in columns], dtype=np.float64)
    peaks = [ceilings.compute_flops_per_s(column[0].dtype) for column in columns]
    experts = [index for index, column in enumerate(columns) if column[0].group == "experts"]

    def floor_at(size: int) -> StepFloor:
        below = min(max(int(np.searchsorted(sizes, size)) - 1, 0), len(sizes) - 2)
        part = (size - sizes[below]) / (sizes[below + 1] - sizes[below])

        def between(amounts: NDArray[np.float64]) -> NDArray[np.float64]:
            at: NDArray[np.float64] = amounts[:, below] + part * (amounts[:, below + 1] - amounts[:, below])
            return at

        moved = between(nbytes)
        for index in experts:
            moved[index] = _read_by(size, sizes, nbytes[index])
        return step_floor(zip(between(flops), moved, peaks, strict=True), ceilings.memory_bytes_per_s)

    return compute_bound_from(floor_at)


def _read_by(size: int, sizes: NDArray[np.float64], nbytes: NDArray[np.float64]) -> float:
    """Bytes of experts that a size reads, E (1 - q^size), with E and q from the least and the largest size known."""
    (low, high), (few, many) = (sizes[0], sizes[-1]), (nbytes[0], nbytes[-1])

    def read_share(n: int, tokens: float) -> float:
        return -math.expm1(tokens * math.log(n / (MOST + 1)))

    n = least(lambda n: few * read_share(n, high) >= many * read_share(n, low)) or MOST
    return float(few * read_share(n, size) / read_share(n, low))


def _doubling(smaller: CellResult, larger: CellResult, axis: Axis, drift: float) -> Doubling:
    small, large = (getattr(cell, SIZE_OF[axis]) for cell in (smaller, larger))
    step = math.log(large / small)
    mutual = math.log1p(_mutual_drift(smaller, larger, drift))
    longer = difference(smaller.time, larger.time, None, machine_half_width=mutual)
    low, high = longer.log_low / step, longer.log_high / step

    def slope(before: float, after: float) -> float:
        return math.log(after / before) / step

    by_bytes = slope(smaller.executed_bytes, larger.executed_bytes)
    by_flops = slope(smaller.model_flops, larger.model_flops)
    return Doubling(
        smaller=small,
        larger=large,
        slope=longer.log_ratio / step,
        low=low,
        high=high,
        bytes_slope=by_bytes,
        flops_slope=by_flops,
        gain=larger.tokens_per_s / smaller.tokens_per_s,
        side=_side(low, high, by_bytes, by_flops),
    )


def _side(low: float, high: float, by_bytes: float, by_flops: float) -> BoundSide:
    """The prediction that the whole interval is nearer to; `neither` if it is clearly outside both."""
    if abs(by_flops - by_bytes) < _LEAST_DIFFERENCE:
        return "undecided"
    lower, upper = sorted((by_bytes, by_flops))
    middle = (lower + upper) / 2
    if high < lower - _LEAST_DIFFERENCE or low > upper + _LEAST_DIFFERENCE:
        return "neither"
    if high < middle:
        return "memory" if by_bytes < by_flops else "compute"
    if low > middle:
        return "compute" if by_bytes < by_flops else "memory"
    return "undecided"


def scaling_sentences(
    result: Scaling, what: Axis = "batch", predicted: float | None = None, no_room: int | None = None
) -> list[str]:
    """Sentences on the knee and the best size of a series; `predicted` is its `DoublingTest.knee_predicted`.

    `no_room` is the smallest size that ran out of memory.
    """
    sentences = []
    first, knee = result.doublings[0].smaller, result.knee_measured
    then = f", so a larger {what} costs little" if no_room is None else f"; {what} {no_room} ran out of memory"
    if result.knee_between is not None:
        low, high = result.knee_between
        drifted = f", with the {percent(result.drift)} by which the machine drifted," if result.drift > _AS_GOOD else ""
        sentences.append(
            f"The position of the knee is unknown: from {what} {low} to {high} the slopes' intervals{drifted} allow for"
            f" time that grows with the {what} and for time that does not."
        )
    elif knee is None:
        sentences.append(f"Up to {what} {result.largest}, time grows clearly more slowly than the {what}{then}.")
    elif knee == first:
        sentences.append(f"Time grows with the {what} from the first doubling on.")
    else:
        sentences.append(
            f"The knee is at {what} {knee}: up to it, time grows clearly more slowly than the {what};"
            " beyond it, time does not."
        )
    if predicted is not None:
        sentences.append(f"By the counts a step is compute-bound from {what} {predicted:.0f}.")
    elif what != "context":
        sentences.append(
            f"By the counts no {what} makes a step compute-bound here: what memory limits takes the larger part of its"
            " floor."
        )
    sentences.append(f"Most tokens/s: {what} {result.best} (largest measured: {result.largest}).")
    if result.rivals:
        sentences.append(
            f"The machine drifted by {percent(result.drift)} meanwhile, so the most may also be at {what}"
            f" {', '.join(map(str, result.rivals))}."
        )
    return sentences


SIZE_OF: dict[Axis, str] = {"batch": "batch_size", "prompt": "prompt_len", "context": "context_len"}
"""The column that each axis doubles."""
_FIXED: dict[Axis, tuple[str, ...]] = {
    "batch": ("phase", "engine", "prompt_len", "context_len"),
    "prompt": ("phase", "engine", "batch_size"),
    # Without `filled`, a prompt as long as a directly filled context would be the same size twice.
    "context": ("phase", "engine", "batch_size", "filled"),
}
_PHASE_OF: dict[Axis, Phase] = {"prompt": "prefill", "context": "decode"}
Series = tuple[Axis, tuple[str | int, ...]]
"""An axis, and the values of the columns that are constant along it."""


@dataclass(frozen=True)
class DoublingTest:
    """The doubling test of one series of cells: its axis, its constant columns, and its results."""

    axis: Axis
    fixed: Mapping[str, str | int]
    """The constant columns and their values, which all cells of the series share."""
    doublings: tuple[Doubling, ...]
    best: int
    largest: int
    knee_measured: int | None
    knee_predicted: float | None
    """The batch, or the prompt, from which a step is compute-bound by the counts; None if never, or along contexts."""
    sentences: tuple[str, ...]
    knee_between: tuple[int, int] | None = None

    @property
    def series(self) -> Series:
        """The series of this test."""
        return self.axis, tuple(self.fixed.values())

    @property
    def sides(self) -> dict[int, BoundSide]:
        """By size: the ceiling that doubling it indicates; for the largest size, doubling to it."""
        last = self.doublings[-1]
        return {step.smaller: step.side for step in self.doublings} | {last.larger: last.side}

    def holds(self, cell: CellResult) -> bool:
        """Whether a cell belongs to the series."""
        return all(getattr(cell, column) == value for column, value in self.fixed.items())


def series_of(cell: CellResult) -> Iterator[Series]:
    """The series to which a cell may belong."""
    for axis, fixed in _FIXED.items():
        if _PHASE_OF.get(axis, cell.phase) == cell.phase:
            yield axis, tuple(getattr(cell, column) for column in fixed)


def doubling_tests(
    cells: Sequence[CellResult],
    operators: Mapping[CellKey, Sequence[OperatorWork]],
    ceilings: Ceilings,
    drift: float = 0.0,
) -> list[DoublingTest]:
    """A test of every series of at least two sizes: along the batch, the prompt (prefills) and the context (decodes).

    `operators` has the counted work of every cell. `drift` is the machine's drift over the run, as a share.
    """
    groups: dict[Series, list[CellResult]] = {}
    no_room: dict[Series, int] = {}
    for cell in cells:
        for series in series_of(cell):
            if cell.status == "ok":
                groups.setdefault(series, []).append(cell)
            elif cell.status == "oom":
                size = getattr(cell, SIZE_OF[series[0]])
                no_room[series] = min(size, no_room.get(series, size))
    tests = []
    for (axis, values), group in groups.items():
        if len({getattr(cell, SIZE_OF[axis]) for cell in group}) > 1:
            result = scaling(group, axis, drift)
            by_size = {getattr(cell, SIZE_OF[axis]): operators[cell.key] for cell in group}
            predicted = None if axis == "context" else compute_bound_by_counts(by_size, ceilings)
            tests.append(
                view(
                    DoublingTest,
                    result,
                    axis=axis,
                    fixed=dict(zip(_FIXED[axis], values, strict=True)),
                    knee_predicted=predicted,
                    sentences=tuple(scaling_sentences(result, axis, predicted, no_room.get((axis, values)))),
                )
            )
    return sorted(tests, key=lambda test: list(_FIXED).index(test.axis))
