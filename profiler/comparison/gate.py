"""The verdict of a gate over all cells of a comparison: pass, slower, or inconclusive with the time that it lacks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Annotated, Literal

from profiler.comparison.compare import Change, Comparison
from profiler.grid.cells import PHASES, Phase
from profiler.json_document import HIDDEN, Finite
from profiler.judge.difference import has_claim_repetitions
from profiler.stats import LEAST_REPETITIONS, MAD_TO_SIGMA

Decision = Literal["pass", "slower", "open"]
Outcome = Literal["pass", "slower", "inconclusive", "not comparable"]

# A 95 % interval is two standard deviations wide on each side (JCGM 100:2008, 6.2).
_COVERAGE = 2.0
ALONE = 2.0
"""In a gate that passes, no single cell may be slower by this multiple of the threshold."""
# Fewer cells do not give the variance between cells.
_LEAST_POOLED = 4
# Fewer cells do not show how far single cells scatter in these two runs.
_LEAST_SCATTERED = 8
# A cell that needs more than a hundred times its repetitions is at the threshold itself.
_MOST_REPETITIONS = 100.0
# exp(700) is near the largest float64.
_MOST_LOGARITHM = 700.0


@dataclass(frozen=True, kw_only=True)
class GatedCell(Change):
    """One cell with the gate's decision."""

    gate: Decision
    pooled: float
    """The cell's change, pooled with all cells of its phase."""
    pooled_low: float
    pooled_high: Finite
    """95 % interval of `pooled`; null is infinite."""
    alone_high: Finite
    """Upper end of the 95 % interval from the cell's own repetitions only; null is infinite."""
    more_s: Finite
    """Seconds of further repetitions, per run, that would decide the cell; null if no budget would.

    0 if it is decided, or if the time of a repetition is unknown."""
    drifted: Annotated[bool, HIDDEN]
    """Whether only the machine's own drift makes `more_s` infinite: on a stable machine further repetitions would
    decide."""


@dataclass(frozen=True)
class PhaseGate:
    """All cells of one phase together."""

    phase: Phase
    max_slowdown: float
    change: Finite
    """Mean change of the cells; null if all of them were disturbed."""
    low: float
    high: Finite
    """95 % interval of the mean; null is infinite."""
    gate: Decision
    cells: Annotated[tuple[GatedCell, ...], HIDDEN]


@dataclass(frozen=True)
class Gate:
    """A comparison with the decisions on its phases: is anything slower than allowed?"""

    comparison: Comparison
    phases: tuple[PhaseGate, ...]

    @property
    def cells(self) -> tuple[GatedCell, ...]:
        return tuple(cell for phase in self.phases for cell in phase.cells)

    @property
    def outcome(self) -> Outcome:
        if not self.comparison.comparable:
            return "not comparable"
        decisions = {phase.gate for phase in self.phases}
        if "slower" in decisions:
            return "slower"
        return "pass" if decisions == {"pass"} else "inconclusive"

    @property
    def more_s(self) -> float:
        """Seconds of further repetitions, per run, that would decide all open cells; infinite if no budget would."""
        return sum(cell.more_s for cell in self.cells)


def gate(comparison: Comparison, thresholds: Mapping[Phase, float]) -> Gate:
    """Decide every phase that has both a threshold and a cell; none if the two sides are not comparable."""
    changes = {phase: [item for item in comparison.changes if item.phase == phase] for phase in PHASES}
    decided = [phase for phase in PHASES if comparison.comparable and changes[phase] and phase in thresholds]
    return Gate(comparison, tuple(_phase_gate(phase, thresholds[phase], changes[phase]) for phase in decided))


@dataclass(frozen=True)
class _Pool:
    """A random-effects summary of changes, in logarithms."""

    mean: float
    variance: float
    """Variance of the mean."""
    between: float
    """Variance between cells that their own intervals do not explain."""


def _phase_gate(phase: Phase, threshold: float, changes: Sequence[Change]) -> PhaseGate:
    fair = [item for item in changes if not item.disturbed]
    pool = _pooled(fair) if fair else None
    # The standard deviation of the error that all cells share: the machine's part, and its drift within each run.
    errors = ((item.machine_half_width / _COVERAGE, item.before.drift, item.after.drift) for item in changes)
    shared = max(math.hypot(*each) for each in errors)
    limit, limit_alone = math.log1p(threshold), math.log1p(ALONE * threshold)
    scatter = _scatter(fair)
    cells = []
    for item in changes:
        own, own_variance = item.difference.log_ratio, _own_variance(item)
        mean, variance, weight = _shrunk(own, own_variance, pool) if pool and item in fair else (own, own_variance, 1.0)
        half_width = _COVERAGE * math.sqrt(variance + shared**2)
        own_half_width = _COVERAGE * math.sqrt(scatter**2 * own_variance + shared**2)
        decision: Decision = "open"
        # Among many cells, one with a few repetitions looks slower by chance: then the estimate must rest on all.
        if not item.disturbed and (item.repetitions >= LEAST_REPETITIONS or weight < 0.5):
            if mean - half_width > limit:
                decision = "slower"
            elif mean + half_width <= limit and own + own_half_width <= limit_alone:
                decision = "pass"
        more_s = still_s = 0.0
        if decision == "open":
            gaps = ((abs(mean - limit), half_width), (abs(own - limit_alone), own_half_width))
            drifts = (_COVERAGE * shared, 0.0)
            more_s, still_s = (max(_more_s(item, *each, fixed) for each in gaps) for fixed in drifts)
        cells.append(
            GatedCell(
                **vars(item),
                gate=decision,
                pooled=math.expm1(mean),
                pooled_low=math.expm1(mean - half_width),
                pooled_high=_share(mean + half_width),
                alone_high=_share(own + own_half_width),
                more_s=more_s,
                drifted=still_s < more_s == math.inf,
            )
        )
    middle, low, high = math.nan, -1.0, math.inf
    if pool is not None:
        half_width = _COVERAGE * math.sqrt(pool.variance + shared**2)
        middle = math.expm1(pool.mean)
        low, high = math.expm1(pool.mean - half_width), _share(pool.mean + half_width)
    # The mean of few cells is a claim only if each has enough repetitions.
    is_claim = len(fair) >= _LEAST_POOLED or all(has_claim_repetitions(item.repetitions) for item in fair)
    # All cells must pass, so a slower cell passes no more often among many than by itself (an intersection-union test:
    # Berger, Technometrics 24, 1982, 295-300).
    decided: Decision = "pass" if all(cell.gate == "pass" for cell in cells) else "open"
    if (is_claim and low > threshold) or any(cell.gate == "slower" for cell in cells):
        decided = "slower"
    return PhaseGate(phase, threshold, middle, low, high, decided, tuple(cells))


def _share(logarithm: float) -> float:
    return math.expm1(logarithm) if logarithm < _MOST_LOGARITHM else math.inf


def _scatter(changes: Sequence[Change]) -> float:
    """Scatter of cells about their median, in units of their own standard deviations; 1 for fewer than eight cells.

    Four repetitions give wide intervals, because they say little about their own spread; many cells together show it.
    The scatter is taken about the median, so a few cells that did change do not count (an empirical null: Efron,
    Journal of the American Statistical Association 99, 2004, 96-104; small-sample factor: Croux and Rousseeuw, COMPSTAT
    1992, 411-428). At most 1: cells that did change do not widen an interval.
    """
    count = len(changes)
    if count < _LEAST_SCATTERED:
        return 1.0
    middle = median(item.difference.log_ratio for item in changes)
    distances = [abs(item.difference.log_ratio - middle) / math.sqrt(_own_variance(item)) for item in changes]
    return min(1.0, MAD_TO_SIGMA * median(distances) * count / (count - 0.8))


def _own_variance(change: Change) -> float:
    """Variance of the logarithm of a cell's change, without the machine's part.

    A run's common drift may be scatter of each cell instead, so it counts here too: a cell differs from its phase only
    beyond its whole interval.
    """
    half_width = (change.difference.log_high - change.difference.log_low) / 2
    return max(1e-12, half_width**2 - change.machine_half_width**2) / _COVERAGE**2


def _pooled(changes: Sequence[Change]) -> _Pool:
    """Pool the changes of a phase with a random-effects model: cells may differ by more than their own intervals.

    Source: DerSimonian and Laird, Controlled Clinical Trials 7, 1986, 177-188.
    """
    values = [item.difference.log_ratio for item in changes]
    variances = [_own_variance(item) for item in changes]
    weights = [1 / variance for variance in variances]
    mean, total = fmean(values, weights), sum(weights)
    if len(changes) < _LEAST_POOLED:
        return _Pool(mean, 1 / total, math.inf)
    spread = sum(weight * (value - mean) ** 2 for weight, value in zip(weights, values, strict=True))
    scale = total - sum(weight**2 for weight in weights) / total
    between = max(0.0, (spread - (len(changes) - 1)) / scale)
    weights = [1 / (variance + between) for variance in variances]
    return _Pool(fmean(values, weights), 1 / sum(weights), between)


def _shrunk(value: float, variance: float, pool: _Pool) -> tuple[float, float, float]:
    """(mean, variance, weight of the own value) of one cell, shrunk towards its phase by as much as cells agree.

    Shrunk estimates need no further correction for multiple comparisons (Gelman, Hill and Yajima, Journal of Research
    on Educational Effectiveness 5, 2012, 189-211).
    """
    if math.isinf(pool.between):
        return value, variance, 1.0
    weight = pool.between / (pool.between + variance)
    mean = weight * value + (1 - weight) * pool.mean
    return mean, weight * variance + (1 - weight) ** 2 * pool.variance, weight


def _more_s(change: Change, gap: float, half_width: float, fixed: float) -> float:
    """Seconds of repetitions that narrow a half width to `gap`; none narrows `fixed`, the machine's own part."""
    repetitions, repetition_s = max(1, change.repetitions), max(change.before.repetition_s, change.after.repetition_s)
    factor = (half_width**2 - fixed**2) / (gap**2 - fixed**2) if gap > fixed else math.inf
    if factor > _MOST_REPETITIONS:
        return math.inf
    return repetition_s * max(1.0, repetitions * factor - repetitions, LEAST_REPETITIONS - repetitions)
