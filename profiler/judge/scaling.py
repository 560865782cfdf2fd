"""Doubling a size: measured slopes next to those that bytes and FLOPs predict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from profiler.grid.cells import Phase
from profiler.judge.cells import CellResult
from profiler.stats import CLAIM_VISITS
from profiler.units import percent

Axis = Literal["batch", "prompt", "context"]
BoundSide = Literal["memory", "compute", "neither", "undecided"]

# A slope decides between two predictions that lie at least this far apart; nearer, it proves nothing.
_TELLING = 0.25
# A doubling that costs less than this much of a doubled time has not yet reached the knee.
_KNEE_SLOPE = 0.5
_AS_GOOD = 0.01


@dataclass(frozen=True)
class ScalingPoint:
    """One measured size (a batch, a context, a prompt), with the work counted for it."""

    size: int
    time_s: float
    low_s: float
    high_s: float
    flops: float
    bytes: float
    tokens_per_s: float
    executed_bytes: float = 0.0
    """What the library's path moves, which is what its time can be held against; 0 where it is not known."""
    visits: int = CLAIM_VISITS


@dataclass(frozen=True)
class Doubling:
    """From one measured size to the next."""

    smaller: int
    larger: int
    slope: float
    """d log(time) / d log(size): 0 when the larger size is free, 1 when time grows in proportion."""
    low: float
    high: float
    """The slope's interval, from those of both times and the machine's drift between them."""
    bytes_slope: float
    """The slope if bytes set the time."""
    flops_slope: float
    """The slope if FLOPs set the time."""
    gain: float
    """Tokens/s of the larger size over those of the smaller."""
    side: BoundSide
    """What the slope speaks for: a KV-dominated decode grows with the batch while memory-bound, so that a slope near 1
    says nothing where both predictions are near 1."""


@dataclass(frozen=True)
class Scaling:
    """A whole series of sizes."""

    doublings: tuple[Doubling, ...]
    best: int
    """The smallest size that has, within a hundredth, the most tokens/s."""
    largest: int
    """The largest size that was measured."""
    knee_measured: int | None
    """The size from which on every doubling costs more than half of a doubled time, by its whole interval; None where
    the last does not, or where that cannot be told."""
    knee_predicted: float | None
    """Where the time of FLOPs overtakes that of bytes at the measured roofs; None when it never does."""
    knee_between: tuple[int, int] | None = None
    """The sizes from and to which intervals allow for both, where they lie between the one and the other."""
    drift: float = 0.0
    """By how much the machine drifted between neighbouring sizes, as a share."""
    rivals: tuple[int, ...] = ()
    """Sizes that would have more tokens/s than the best, had the machine drifted between their visits and its."""

    @property
    def ever_compute_bound(self) -> bool:
        """Whether any size could be compute-bound by the counts."""
        return self.knee_predicted is not None


def scaling(points: Sequence[ScalingPoint], flops_per_s: float, bytes_per_s: float, drift: float = 0.0) -> Scaling:
    """Slopes between neighbouring sizes, the best size, and the knee. Raises ValueError for fewer than two sizes.

    `drift` is by how much the machine drifted over the run: what sizes differ by is known no better, unless they were
    visited in turn.
    """
    ordered = sorted(points, key=lambda point: point.size)
    if len(ordered) < 2:
        raise ValueError("a slope needs two sizes or more")
    found = tuple(_doubling(smaller, larger, drift) for smaller, larger in itertools.pairwise(ordered))
    first, last = ordered[0], ordered[-1]
    span = last.size - first.size
    knee, between = _knee(found)
    best = ordered[best_of([point.tokens_per_s for point in ordered])]
    return Scaling(
        doublings=found,
        best=best.size,
        largest=last.size,
        knee_measured=knee,
        knee_between=between,
        knee_predicted=crossover(
            first.flops,
            first.bytes,
            (last.flops - first.flops) / span,
            (last.bytes - first.bytes) / span,
            flops_per_s,
            bytes_per_s,
            first.size,
        ),
        drift=max(_between(smaller, larger, drift) for smaller, larger in itertools.pairwise(ordered)),
        rivals=tuple(
            point.size
            for point in ordered
            if point is not best
            and point.tokens_per_s * (1 + _between(point, best, drift)) > (1 + _AS_GOOD) * best.tokens_per_s
        ),
    )


def _between(one: ScalingPoint, other: ScalingPoint, drift: float) -> float:
    """The part of a drift that may lie between two sizes: none where equally many shuffled rounds visited both."""
    return 0.0 if one.visits == other.visits >= CLAIM_VISITS else drift


def best_of(tokens_per_s: Sequence[float]) -> int:
    """Which of ascending sizes is the smallest that has, within a hundredth, the most tokens/s."""
    most = max(tokens_per_s)
    return next(number for number, each in enumerate(tokens_per_s) if each >= (1 - _AS_GOOD) * most)


def _knee(found: Sequence[Doubling]) -> tuple[int | None, tuple[int, int] | None]:
    """The knee, or the sizes between which it lies where the slopes' intervals do not tell."""
    flat = max((number for number, item in enumerate(found) if item.high < _KNEE_SLOPE), default=-1)
    grows = len(found)
    while grows > 0 and found[grows - 1].low >= _KNEE_SLOPE:
        grows -= 1
    knee = found[grows].smaller if grows < len(found) else None
    if flat == grows - 1:
        return knee, None
    return None, (found[flat + 1].smaller, knee or found[-1].larger)


def crossover(
    flops: float,
    bytes_: float,
    flops_per_size: float,
    bytes_per_size: float,
    flops_per_s: float,
    bytes_per_s: float,
    size: float = 0.0,
) -> float | None:
    """The size from which FLOPs take longer than bytes; None when bytes stay ahead however large it gets.

    FLOPs and bytes are linear in the size and known at `size`. With F(b) = F0 + f (b - b0) and B(b) likewise the two
    times are equal at b0 + (B0 / W - F0 / P) / (f / P - k / W); it exists while f / k lies above the ridge P / W.
    """
    gained_s = flops_per_size / flops_per_s - bytes_per_size / bytes_per_s
    lead_s = bytes_ / bytes_per_s - flops / flops_per_s
    if lead_s <= 0:
        return size
    return size + lead_s / gained_s if gained_s > 0 else None


def _doubling(smaller: ScalingPoint, larger: ScalingPoint, drift: float) -> Doubling:
    step = math.log(larger.size / smaller.size)
    drifted = math.log1p(_between(smaller, larger, drift)) / step

    def slope(before: float, after: float) -> float:
        return math.log(after / before) / step

    low, high = slope(smaller.high_s, larger.low_s) - drifted, slope(smaller.low_s, larger.high_s) + drifted
    by_bytes = slope(smaller.executed_bytes or smaller.bytes, larger.executed_bytes or larger.bytes)
    by_flops = slope(smaller.flops, larger.flops)
    return Doubling(
        smaller=smaller.size,
        larger=larger.size,
        slope=slope(smaller.time_s, larger.time_s),
        low=low,
        high=high,
        bytes_slope=by_bytes,
        flops_slope=by_flops,
        gain=larger.tokens_per_s / smaller.tokens_per_s,
        side=_side(low, high, by_bytes, by_flops),
    )


def _side(low: float, high: float, by_bytes: float, by_flops: float) -> BoundSide:
    """Which prediction the whole interval is nearer to; `neither` when it lies clearly outside both."""
    if abs(by_flops - by_bytes) < _TELLING:
        return "undecided"
    lower, upper = sorted((by_bytes, by_flops))
    middle = (lower + upper) / 2
    if high < lower - _TELLING or low > upper + _TELLING:
        return "neither"
    if high < middle:
        return "memory" if by_bytes < by_flops else "compute"
    if low > middle:
        return "compute" if by_bytes < by_flops else "memory"
    return "undecided"


def scaling_sentences(result: Scaling, what: str = "batch") -> list[str]:
    """What the series says, in words with its figures."""
    found = []
    first, knee = result.doublings[0].smaller, result.knee_measured
    if result.knee_between is not None:
        low, high = result.knee_between
        drifted = f", with the {percent(result.drift)} by which the machine drifted," if result.drift > _AS_GOOD else ""
        found.append(
            f"Where the knee lies cannot be told: from {what} {low} to {high} the slopes' intervals{drifted} allow for"
            f" time that grows with the {what} and for time that does not."
        )
    elif knee is None:
        found.append(
            f"Up to {what} {result.largest} time grows clearly slower than the {what}: not yet compute-bound, and more"
            " tokens/s for little."
        )
    elif knee == first:
        found.append(f"Time grows with the {what} from the first doubling on.")
    else:
        found.append(
            f"The knee lies at {what} {knee}: up to it time grows clearly slower than the {what}, beyond it not."
        )
    if result.knee_predicted is None:
        found.append(
            f"By the counts no {what} is ever compute-bound here: the bytes that each step up adds take longer than its"
            " FLOPs."
        )
    else:
        found.append(f"By the counts FLOPs overtake bytes at {what} {result.knee_predicted:.3g}.")
    found.append(f"Most tokens/s: {what} {result.best} (largest measured: {result.largest}).")
    if result.rivals:
        found.append(
            f"The machine drifted by {percent(result.drift)} meanwhile, so that most may as well be at {what}"
            f" {', '.join(map(str, result.rivals))}."
        )
    return found


SIZE_OF: dict[Axis, str] = {"batch": "batch_size", "prompt": "prompt_len", "context": "context_len"}
"""The column that each axis doubles."""
_FIXED: dict[Axis, tuple[str, ...]] = {
    "batch": ("phase", "engine", "prompt_len", "context_len"),
    "prompt": ("phase", "engine", "batch_size"),
    # A prompt as long as a context that was filled directly is the same size twice.
    "context": ("phase", "engine", "batch_size", "filled"),
}
_PHASE_OF: dict[Axis, Phase] = {"prompt": "prefill", "context": "decode"}
Series = tuple[Axis, tuple[str | int, ...]]
"""An axis, and the values of what is held fixed along it."""


@dataclass(frozen=True)
class DoublingTest:
    """One series of sizes among a run's cells: what was doubled, what was held fixed, and what came of it."""

    axis: Axis
    fixed: Mapping[str, str | int]
    """Columns and their values; all cells of the series share them."""
    doublings: tuple[Doubling, ...]
    best: int
    largest: int
    knee_measured: int | None
    knee_predicted: float | None
    sentences: tuple[str, ...]
    knee_between: tuple[int, int] | None = None

    @property
    def series(self) -> Series:
        """The series that this is of."""
        return self.axis, tuple(self.fixed.values())

    @property
    def sides(self) -> dict[int, BoundSide]:
        """By size, what doubling it speaks for; for the largest, what doubling to it did."""
        last = self.doublings[-1]
        return {step.smaller: step.side for step in self.doublings} | {last.larger: last.side}

    def holds(self, cell: CellResult) -> bool:
        """Whether a cell belongs to this series."""
        return all(getattr(cell, column) == value for column, value in self.fixed.items())


def series_of(cell: CellResult) -> Iterator[Series]:
    """The series that a cell may be of."""
    for axis, fixed in _FIXED.items():
        if _PHASE_OF.get(axis, cell.phase) == cell.phase:
            yield axis, tuple(getattr(cell, column) for column in fixed)


def doubling_tests(
    cells: Sequence[CellResult], flops_per_s: float, bytes_per_s: float, drift: float = 0.0
) -> list[DoublingTest]:
    """Every series of two sizes or more among the cells that have a number.

    Along the batch, the prompt (prefills) and the context (decodes); the roofs are those that FLOPs and bytes were
    measured under, the drift is the machine's own over the run.
    """
    groups: dict[Series, list[CellResult]] = {}
    for cell in cells:
        if cell.status == "ok":
            for series in series_of(cell):
                groups.setdefault(series, []).append(cell)
    found = []
    for (axis, values), group in groups.items():
        if len({getattr(cell, SIZE_OF[axis]) for cell in group}) > 1:
            result = scaling([_point(cell, SIZE_OF[axis]) for cell in group], flops_per_s, bytes_per_s, drift)
            found.append(_test(axis, dict(zip(_FIXED[axis], values, strict=True)), result))
    return sorted(found, key=lambda test: list(_FIXED).index(test.axis))


def _point(cell: CellResult, column: str) -> ScalingPoint:
    return ScalingPoint(
        size=getattr(cell, column),
        time_s=cell.latency_s,
        low_s=cell.latency_low_s,
        high_s=cell.latency_high_s,
        flops=float(cell.model_flops),
        bytes=float(cell.model_bytes),
        tokens_per_s=cell.tokens_per_s,
        executed_bytes=float(cell.executed_bytes),
        visits=cell.visits or 1,
    )


def _test(axis: Axis, fixed: Mapping[str, str | int], result: Scaling) -> DoublingTest:
    return DoublingTest(
        axis=axis,
        fixed=fixed,
        doublings=result.doublings,
        best=result.best,
        largest=result.largest,
        knee_measured=result.knee_measured,
        knee_predicted=result.knee_predicted,
        sentences=tuple(scaling_sentences(result, axis)),
        knee_between=result.knee_between,
    )
