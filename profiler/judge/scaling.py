"""Doubling tests: measured slopes of time over size, next to those that bytes and FLOPs predict."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from profiler.counting.floor import MOST, least, step_floor
from profiler.facts.ceilings import Ceilings
from profiler.facts.operators import Amount, OperatorWork
from profiler.grid.cells import CellKey, Phase
from profiler.judge.cell_stages import Timed
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
    """The smallest size whose tokens/s are within 1 % of the most."""
    largest: int
    """The largest measured size."""
    knee_measured: int | None
    """The size from which every doubling has a slope of at least 0.5 over its whole interval; None if the last one has
    not, or if it is uncertain."""
    knee_predicted: float | None
    """The batch, or the prompt, from which a step is compute-bound by the counts; None if never, or along contexts."""
    sentences: tuple[str, ...]
    knee_between: tuple[int, int] | None = None
    """The sizes between which the knee is, if the intervals do not determine it."""

    @property
    def series(self) -> Series:
        return self.axis, tuple(self.fixed.values())

    @property
    def sides(self) -> dict[int, BoundSide]:
        """By size: the ceiling that doubling it indicates; for the largest size, doubling to it."""
        last = self.doublings[-1]
        return {step.smaller: step.side for step in self.doublings} | {last.larger: last.side}

    def holds(self, key: CellKey) -> bool:
        """Whether a cell belongs to the series."""
        return self.series in series_of(key)


def scaling(
    cells: Sequence[Timed], axis: Axis, drift: float = 0.0, *, fixed: Mapping[str, str | int] | None = None,
    predicted: float | None = None, oom_at: int | None = None,
) -> DoublingTest:  # fmt: skip
    """Slopes between neighbouring sizes, the best size, and the knee.

    `cells` are measured, one per size along `axis`, of two sizes or more. `drift` is the machine's drift over the run,
    as a share. Differences between sizes are no more certain than that, unless the sizes were timed in turn.
    `oom_at` is the smallest size that ran out of memory.
    """

    def size(cell: Timed) -> int:
        return size_of(cell.key, axis)

    ordered = sorted(cells, key=size)
    doublings = tuple(_doubling(smaller, larger, axis, drift) for smaller, larger in itertools.pairwise(ordered))
    knee, between = _knee(doublings)
    best = ordered[best_of([cell.tokens_per_s for cell in ordered])]
    drifted = max(_mutual_drift(smaller, larger, drift) for smaller, larger in itertools.pairwise(ordered))
    test = DoublingTest(axis, fixed or {}, doublings, size(best), size(ordered[-1]), knee, predicted, (), between)
    sentences = _knee_sentences(test, oom_at, drifted)
    sentences.append(f"Most tokens/s: {axis} {test.best} (largest measured: {test.largest}).")
    # Sizes that may have more, given the machine's drift between the repetitions of both.
    rivals = [
        str(size(cell))
        for cell in ordered
        if cell is not best
        and cell.tokens_per_s * (1 + _mutual_drift(cell, best, drift)) > (1 + _AS_GOOD) * best.tokens_per_s
    ]
    if rivals:
        also = f"{axis} {', '.join(rivals)}"
        sentences.append(f"The machine drifted by {percent(drifted)} meanwhile, so the most may also be at {also}.")
    return replace(test, sentences=tuple(sentences))


def _mutual_drift(one: Timed, other: Timed, drift: float) -> float:
    """The drift between the repetitions of two sizes; 0 if both were timed in the same number of shuffled rounds."""
    return 0.0 if len(one.samples) == len(other.samples) >= CLAIM_REPETITIONS else drift


def best_of(tokens_per_s: Sequence[float]) -> int:
    """The index of the smallest size, of ascending sizes, whose tokens/s are within 1 % of the most."""
    most = max(tokens_per_s)
    return next(index for index, each in enumerate(tokens_per_s) if each >= (1 - _AS_GOOD) * most)


def _knee(doublings: Sequence[Doubling]) -> tuple[int | None, tuple[int, int] | None]:
    """(knee, None), or (None, the sizes between which it is) if the slopes' intervals do not determine it."""
    flat = max((index for index, item in enumerate(doublings) if item.high < _KNEE_SLOPE), default=-1)
    at_the_end = itertools.takewhile(lambda item: item.low >= _KNEE_SLOPE, reversed(doublings))
    steep = len(doublings) - len(list(at_the_end))
    knee = doublings[steep].smaller if steep < len(doublings) else None
    if flat == steep - 1:
        return knee, None
    return None, (doublings[flat + 1].smaller, knee or doublings[-1].larger)


def compute_bound_by_counts(by_size: Mapping[int, Sequence[OperatorWork]], ceilings: Ceilings) -> int | None:
    """The smallest size at which a step is compute-bound, from its operators at two or more.

    FLOPs and bytes are linear between neighbouring sizes, and beyond the last ones. Along the batch that is exact, but
    for the weights of experts: T tokens read E (1 - q^T) experts, where q follows from the least and the largest size.
    """
    sizes = np.array(sorted(by_size), dtype=np.float64)
    columns = list(zip(*(by_size[int(size)] for size in sizes), strict=True))
    flops = np.array([[item.flops for item in column] for column in columns], dtype=np.float64)
    nbytes = np.array([[item.model_bytes for item in column] for column in columns], dtype=np.float64)
    peaks = [ceilings.compute_flops_per_s(column[0].dtype) for column in columns]
    experts = [index for index, column in enumerate(columns) if column[0].group == "experts"]

    def is_compute_bound(size: int) -> bool:
        below = min(max(int(np.searchsorted(sizes, size)) - 1, 0), len(sizes) - 2)
        part = (size - sizes[below]) / (sizes[below + 1] - sizes[below])

        def between(amounts: NDArray[np.float64]) -> NDArray[np.float64]:
            at: NDArray[np.float64] = amounts[:, below] + part * (amounts[:, below + 1] - amounts[:, below])
            return at

        moved = between(nbytes)
        for index in experts:
            moved[index] = _read_by(size, sizes, nbytes[index])
        floor = step_floor(zip(between(flops), moved, peaks, strict=True), ceilings.memory_bytes_per_s)
        return bool(floor.bound == "compute")

    return least(is_compute_bound)


def _read_by(size: int, sizes: NDArray[np.float64], nbytes: NDArray[np.float64]) -> float:
    """Bytes of experts that a size reads, E (1 - q^size), with E and q from the least and the largest size known."""
    (low, high), (few, many) = (sizes[0], sizes[-1]), (nbytes[0], nbytes[-1])

    def read_share(n: int, tokens: float) -> float:
        return -math.expm1(tokens * math.log(n / (MOST + 1)))

    n = least(lambda n: few * read_share(n, high) >= many * read_share(n, low)) or MOST
    return float(few * read_share(n, size) / read_share(n, low))


def _doubling(smaller: Timed, larger: Timed, axis: Axis, drift: float) -> Doubling:
    small, large = size_of(smaller.key, axis), size_of(larger.key, axis)
    step = math.log(large / small)
    longer = difference(
        smaller.steady, larger.steady, None, machine_half_width=math.log1p(_mutual_drift(smaller, larger, drift))
    )
    low, high = longer.log_low / step, longer.log_high / step

    def slope(amount: Callable[[OperatorWork], Amount]) -> float:
        before, after = (sum(map(amount, cell.operators)) for cell in (smaller, larger))
        return math.log(after / before) / step

    by_bytes, by_flops = slope(lambda item: item.executed_bytes), slope(lambda item: item.flops)
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
    if low <= middle <= high:
        return "undecided"
    return "memory" if (high < middle) == (by_bytes < by_flops) else "compute"


def _knee_sentences(test: DoublingTest, oom_at: int | None, drifted: float) -> list[str]:
    what, first, knee = test.axis, test.doublings[0].smaller, test.knee_measured
    if test.knee_between is not None:
        low, high = test.knee_between
        with_drift = f", with the {percent(drifted)} by which the machine drifted," if drifted > _AS_GOOD else ""
        found = (
            f"The position of the knee is unknown: from {what} {low} to {high} the slopes' intervals{with_drift} allow"
            f" for time that grows with the {what} and for time that does not."
        )
    elif knee is None:
        then = f", so a larger {what} costs little" if oom_at is None else f"; {what} {oom_at} ran out of memory"
        found = f"Up to {what} {test.largest}, time grows clearly more slowly than the {what}{then}."
    elif knee == first:
        found = f"Time grows with the {what} from the first doubling on."
    else:
        found = (
            f"The knee is at {what} {knee}: up to it, time grows clearly more slowly than the {what};"
            " beyond it, time does not."
        )
    if test.knee_predicted is not None:
        return [found, f"By the counts a step is compute-bound from {what} {test.knee_predicted:.0f}."]
    never = (
        f"By the counts no {what} makes a step compute-bound here: what memory limits takes the larger part of its"
        " floor."
    )
    return [found] if what == "context" else [found, never]


def size_of(key: CellKey, axis: Axis) -> int:
    return {"batch": key.cell.batch_size, "prompt": key.cell.prompt_len, "context": key.context_len}[axis]


def series_of(key: CellKey) -> Iterator[Series]:
    columns = key.columns | {"filled": "by a prompt" if key.cell.prompt_len else "directly"}
    for axis, fixed in _FIXED.items():
        if _PHASE_OF.get(axis, key.phase) == key.phase:
            yield axis, tuple(columns[name] for name in fixed)


def doubling_tests(cells: Sequence[Timed], ceilings: Ceilings, drift: float = 0.0) -> list[DoublingTest]:
    """A test of each series of at least two sizes: along the batch, the prompt (prefills) and the context (decodes)."""
    groups: dict[Series, list[Timed]] = {}
    oom_at: dict[Series, int] = {}
    for cell in cells:
        for series in series_of(cell.key):
            if cell.status == "ok":
                groups.setdefault(series, []).append(cell)
            elif cell.status == "oom":
                size = size_of(cell.key, series[0])
                oom_at[series] = min(size, oom_at.get(series, size))
    tests = []
    for (axis, values), group in groups.items():
        by_size = {size_of(cell.key, axis): cell.operators for cell in group}
        if len(by_size) > 1:
            predicted = None if axis == "context" else compute_bound_by_counts(by_size, ceilings)
            fixed, full = dict(zip(_FIXED[axis], values, strict=True)), oom_at.get((axis, values))
            tests.append(scaling(group, axis, drift, fixed=fixed, predicted=predicted, oom_at=full))
    return sorted(tests, key=lambda test: list(_FIXED).index(test.axis))
