"""The verdict of a gate over all cells of a comparison: pass, slower, or inconclusive and what would settle it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from profiler.comparison.compare import Change, Comparison
from profiler.grid.cells import PHASES, Phase
from profiler.stats import CLAIM_VISITS, LEAST_VISITS

Decision = Literal["pass", "slower", "open"]
Outcome = Literal["pass", "slower", "inconclusive", "not comparable"]

# A 95 % interval is two standard deviations wide on each side (JCGM 100:2008, 6.2).
_COVERAGE = 2.0
ALONE = 2.0
"""By this many times what is allowed no single cell may be slower in a gate that passes."""
# Fewer cells do not tell how far changes of cells lie apart.
_LEAST_POOLED = 4
# Fewer cells do not tell how far the changes of single cells scatter in these two runs.
_LEAST_TELLING = 8
# The median distance from the median, as one standard deviation of a normal distribution.
_MAD_TO_SIGMA = 1.4826
# A cell that needs a hundred times its visits lies at the threshold itself.
_MOST_VISITS = 100.0
# exp(700) is near the largest number that there is.
_MOST_LOGARITHM = 700.0


@dataclass(frozen=True)
class Gated:
    """One cell under the gate."""

    change: Change
    estimate: float
    """Its change as all cells of its phase together suggest it."""
    low: float
    high: float
    """95 %."""
    alone_high: float
    """The upper end of what its own visits leave possible."""
    decision: Decision
    more_s: float
    """Seconds of further visits, in each of both runs, after which it would be decided; 0 where it is, and where nobody
    knows how long a visit takes, infinite where no budget would."""
    drifted: bool = False
    """Whether no budget would for the machine's own drift alone: on a still machine further visits would tell."""


@dataclass(frozen=True)
class PhaseGate:
    """All cells of one phase together."""

    phase: Phase
    threshold: float
    cells: tuple[Gated, ...]
    estimate: float
    """The mean change of its cells; NaN where all of them were disturbed."""
    low: float
    high: float
    """Its 95 % interval; infinite where all were."""
    is_claim: bool
    """Whether that mean rests on more than one visit each of a few cells."""

    @property
    def decision(self) -> Decision:
        """Slower where one cell or all together are beyond doubt. A pass says two things of every cell: with what the
        others show it is no slower than allowed, and by its own visits not by twice that. All must hold, so that a
        slower cell passes no more often among many than alone (an intersection-union test: Berger, Technometrics 24,
        1982, 295-300)."""
        if (self.is_claim and self.low > self.threshold) or any(cell.decision == "slower" for cell in self.cells):
            return "slower"
        return "pass" if all(cell.decision == "pass" for cell in self.cells) else "open"


@dataclass(frozen=True)
class Gate:
    """The answer to: is anything slower than that?"""

    comparison: Comparison
    phases: tuple[PhaseGate, ...]

    @property
    def cells(self) -> tuple[Gated, ...]:
        return tuple(cell for phase in self.phases for cell in phase.cells)

    @property
    def outcome(self) -> Outcome:
        if not self.comparison.comparable:
            return "not comparable"
        decisions = {phase.decision for phase in self.phases}
        if "slower" in decisions:
            return "slower"
        return "pass" if decisions == {"pass"} else "inconclusive"

    @property
    def more_s(self) -> float:
        """Seconds of further visits in each of both runs that would decide what is open; infinite where none would."""
        return sum(cell.more_s for cell in self.cells)


def gate(comparison: Comparison, thresholds: Mapping[Phase, float]) -> Gate:
    """Decide by phase; a phase without a threshold is not looked at, one without a cell has nothing to say, and of two
    sides that are not comparable nothing is decided."""
    phases = []
    for phase in PHASES if comparison.comparable else ():
        changes = [item for item in comparison.changes if item.asked.phase == phase]
        if changes and phase in thresholds:
            phases.append(_phase_gate(phase, thresholds[phase], changes))
    return Gate(comparison, tuple(phases))


@dataclass(frozen=True)
class _Pool:
    """A random-effects summary of some changes, in logarithms."""

    mean: float
    variance: float
    """Of the mean."""
    between: float
    """Variance between cells, beyond what their own intervals explain."""


def _phase_gate(phase: Phase, threshold: float, changes: Sequence[Change]) -> PhaseGate:
    fair = [item for item in changes if not item.disturbed]
    pool = _pooled(fair) if fair else None
    shared = max(map(_shared, changes))
    limit, limit_alone = math.log1p(threshold), math.log1p(ALONE * threshold)
    scatter = _scatter(fair)
    cells = []
    for item in changes:
        own, own_variance = math.log1p(item.change), _own_variance(item)
        mean, variance, weight = _shrunk(own, own_variance, pool) if pool and item in fair else (own, own_variance, 1.0)
        half_width = _COVERAGE * math.sqrt(variance + shared**2)
        deviation = math.sqrt(scatter**2 * own_variance + shared**2)
        beyond = _COVERAGE * deviation
        decision: Decision = "open"
        # Of many cells one with a few visits is bound to look slower: what is claimed must come from all together.
        known_by_itself = item.visits >= LEAST_VISITS or weight < 0.5
        if not item.disturbed and known_by_itself:
            if mean - half_width > limit:
                decision = "slower"
            elif mean + half_width <= limit and own + beyond <= limit_alone:
                decision = "pass"
        more_s = still_s = 0.0
        if decision == "open":
            more_s, still_s = (
                max(
                    _more_s(item, abs(mean - limit), half_width, fixed),
                    _more_s(item, abs(own - limit_alone), beyond, fixed),
                )
                for fixed in (_COVERAGE * shared, 0.0)
            )
        cells.append(
            Gated(
                change=item,
                estimate=math.expm1(mean),
                low=math.expm1(mean - half_width),
                high=_share(mean + half_width),
                alone_high=_share(own + beyond),
                decision=decision,
                more_s=more_s,
                drifted=still_s < more_s == math.inf,
            )
        )
    if pool is None:
        return PhaseGate(phase, threshold, tuple(cells), math.nan, -1.0, math.inf, is_claim=False)
    half_width = _COVERAGE * math.sqrt(pool.variance + shared**2)
    low, high = math.expm1(pool.mean - half_width), _share(pool.mean + half_width)
    is_claim = len(fair) >= _LEAST_POOLED or all(item.visits >= CLAIM_VISITS for item in fair)
    return PhaseGate(phase, threshold, tuple(cells), math.expm1(pool.mean), low, high, is_claim)


def _share(logarithm: float) -> float:
    """A change by its logarithm; infinite where no number holds it."""
    return math.expm1(logarithm) if logarithm < _MOST_LOGARITHM else math.inf


def _scatter(changes: Sequence[Change]) -> float:
    """By how much cells scatter about their middle, in units of what their own intervals say; 1 where they are few.

    Four visits make wide intervals, since they hardly know their own spread; many cells together know it. It is taken
    from the middle of the cells, so that some that did change do not count (an empirical null: Efron, Journal of the
    American Statistical Association 99, 2004, 96-104; the factor for few: Croux and Rousseeuw, COMPSTAT 1992, 411-428).
    Never above 1: an interval is not widened by cells that did change.
    """
    many = len(changes)
    if many < _LEAST_TELLING:
        return 1.0
    middle = median(math.log1p(item.change) for item in changes)
    apart = [abs(math.log1p(item.change) - middle) / math.sqrt(_own_variance(item)) for item in changes]
    return min(1.0, _MAD_TO_SIGMA * median(apart) * many / (many - 0.8))


def _shared(change: Change) -> float:
    """One standard deviation of the error that all cells share: the machine's part, and its drift within each run."""
    return math.hypot(change.machine_half_width / _COVERAGE, change.before.drift, change.after.drift)


def _own_variance(change: Change) -> float:
    """Of the logarithm of a cell's change, without the machine's part.

    What a run takes for a drift of all cells may as well be scatter of each, so that it counts here too: cells are not
    to stand apart from their phase for less than their whole intervals.
    """
    half_width = (math.log1p(change.high) - math.log1p(change.low)) / 2
    return max(1e-12, half_width**2 - change.machine_half_width**2) / _COVERAGE**2


def _pooled(changes: Sequence[Change]) -> _Pool:
    """All changes of a phase together, by a random-effects model (DerSimonian and Laird, Controlled Clinical Trials 7,
    1986, 177-188): cells may differ from each other by more than their own intervals say."""
    values = [math.log1p(item.change) for item in changes]
    variances = [_own_variance(item) for item in changes]
    weights = [1 / variance for variance in variances]
    total = sum(weights)
    mean = sum(weight * value for weight, value in zip(weights, values, strict=True)) / total
    if len(changes) < _LEAST_POOLED:
        return _Pool(mean, 1 / total, math.inf)
    spread = sum(weight * (value - mean) ** 2 for weight, value in zip(weights, values, strict=True))
    scale = total - sum(weight**2 for weight in weights) / total
    between = max(0.0, (spread - (len(changes) - 1)) / scale)
    weights = [1 / (variance + between) for variance in variances]
    total = sum(weights)
    mean = sum(weight * value for weight, value in zip(weights, values, strict=True)) / total
    return _Pool(mean, 1 / total, between)


def _shrunk(value: float, variance: float, pool: _Pool) -> tuple[float, float, float]:
    """(mean, variance, weight of its own figure) of one cell, drawn towards its phase by as much as cells agree.

    Estimates that are shrunk so need no further correction for their number (Gelman, Hill and Yajima, Journal of
    Research on Educational Effectiveness 5, 2012, 189-211).
    """
    if math.isinf(pool.between):
        return value, variance, 1.0
    weight = pool.between / (pool.between + variance)
    mean = weight * value + (1 - weight) * pool.mean
    return mean, weight * variance + (1 - weight) ** 2 * pool.variance, weight


def _more_s(change: Change, gap: float, half_width: float, fixed: float) -> float:
    """Seconds of further visits that would narrow a cell's interval to its distance from the threshold; `fixed` is the
    part of its half width that no visit narrows, the machine's own and its drift."""
    visits = max(1, change.visits)
    factor = (half_width**2 - fixed**2) / (gap**2 - fixed**2) if gap > fixed else math.inf
    if factor > _MOST_VISITS:
        return math.inf
    return max(1.0, visits * factor - visits) * max(change.before.visit_s, change.after.visit_s)
