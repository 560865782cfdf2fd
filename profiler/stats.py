"""All statistics: medians with their intervals, drift, noise, and when there are enough samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    pass

Noise = Literal["quiet", "noisy", "unusable"]

TARGET_HALF_WIDTH = 0.02
"""Of a 95 % interval, as a share of its median: narrower than this, a cell needs no further visit."""

LEAST_VISITS = 4
"""No cell is done before: stopping at two or three visits would pick those that agree by luck."""

CLAIM_VISITS = 2
"""Of each side of a difference: a single visit does not tell what visits of the same cell differ by."""

BLOCK_STEPS = 8
"""Decode steps of one loop that are resampled together, since neighbours are not independent."""

LEAST_SAMPLES = 6
"""Fewer samples have no distribution-free 95 % interval of their median (order statistics: 2 x 0.5^6 = 3 %)."""

VISITED_ONCE = "visited once, so that its interval is within the visit"
"""The reason that tells nothing of how far visits lie apart."""

RESAMPLES = 1000
# So many samples narrow an interval far below what visits differ by, which is then taken from their medians.
_MANY_SAMPLES = 20_000
_RESAMPLES_OF_MANY = 100
# Samples that are gone through together, over all resamples: more than these lie in no cache.
_AT_ONCE = 1 << 17
_SEED = 0

# The share of a normal distribution within one standard deviation, and the end of its middle 95 %.
_ONE_SIGMA = 0.683
_Z95 = 1.959964
# Six visits with a standard deviation of 1 % (evenly spaced quantiles of a normal distribution): over six runs on two
# cores of a shared Xeon that of visits of a cell was 0.8 to 2.0 %, half of them below 1.2; other machines have shown 3.
_USUAL_VISITS = 0.01 * np.array([-1.38, -0.67, -0.21, 0.21, 0.67, 1.38])
# So much is the usual spread worth, in degrees of freedom: machines differ in it by a factor of three.
_USUAL_FREEDOM = 2.0
# A run's other cells are worth no more than this beside a cell's own visits: not all cells scatter alike.
_MOST_FREEDOM = 10.0
# The median of normal visits scatters more than their mean: 1.09 times for four, 1.14 for six, this much in the limit;
# for one and two both are the same, and two do not know their own spread.
_MEDIAN_OVER_MEAN = math.sqrt(math.pi / 2)
_FEW_VISITS = 3
# From so many cells on a run itself shows what all of them did together.
_TELLING_CELLS = 8
# How far the rounds' mean may lie from the middle of a slow drift, in standard deviations between rounds: where a run
# sees half a wave, 1.9 to 2.0 of them cover nine phases of ten (four to six rounds).
_DRIFT_COVERAGE = 2.2

# A cell is quiet when its interval is narrow enough to tell 5 % apart, and unusable when a fifth hides in it.
_QUIET_HALF_WIDTH = 0.025
_USABLE_HALF_WIDTH = 0.10
# Rounds whose medians differ by more than this have drifted.
_DRIFT = 0.05
# A sentinel that changes by more than this over the run says that cells are not to be compared with each other.
_MACHINE_DRIFT = 0.05
# hyperfine's rule for a modified z-score: what lies so far out was disturbed (|x - median| / MAD, MAD scaled to sigma).
_OUTLIER_Z = 14.8
_MANY_OUTLIERS = 0.05
# Two modes: the widest gap between neighbours parts the samples into two groups of at least a fifth each, which lie
# further apart than a tenth of the median and four times the wider group's own spread.
_MODE_SHARE = 0.2
_MODE_DISTANCE = 0.10
_MODE_SPREADS = 4.0
_FEWEST_FOR_MODES = 16
# Others on this process's cores for more than this share of one core have slowed it down.
MOST_FOREIGN_CORES = 0.15


@dataclass(frozen=True)
class Estimate:
    """A median time with its 95 % interval."""

    median_s: float
    low_s: float
    high_s: float
    samples: int

    @property
    def half_width(self) -> float:
        """Half of the interval as a share of the median; infinite for a single sample."""
        if self.samples < 2:
            return math.inf
        return (self.high_s - self.low_s) / 2 / self.median_s


@dataclass(frozen=True)
class VisitSpread:
    """How far visits of one cell lie apart in a run, as shares of its time."""

    visit: float
    """One standard deviation between visits."""
    freedom: float
    """Degrees of freedom that stand behind it, beside the cell's own visits."""
    drift: float = 0.0
    """One standard deviation of what all cells did together from round to round, which no number of visits averages."""


def spread_of(of_cells: Iterable[Mapping[int, float]], swing: float = 0.0) -> VisitSpread:
    """What all cells of a run say of their visits, from each cell's medians by round.

    The spread is a pooled estimate (JCGM 100:2008, 4.2.4): each cell has few visits, the run has many. It is the
    distance within which two thirds of the visits lie, so that a few disturbed cells do not widen all the others. Where
    hardly anything was visited twice, a few imagined visits with the usual spread keep two real ones from deciding for
    all.

    Eight cells and more show a drift of the machine in what their visits have in common. Fewer cannot tell it from what
    visits differ by, so that theirs counts as far as a sentinel saw it as well: `swing` is by how much the same small
    work, done again and again, changed its time over the run.
    """
    cells = [deviations(medians) for medians in of_cells if len(medians) > 1]
    values = [np.fromiter(cell.values(), dtype=np.float64) for cell in cells]
    scaled = [value * math.sqrt(value.size / (value.size - 1)) for value in values]
    visit = float(np.quantile(np.abs(np.concatenate([*scaled, _USUAL_VISITS])), _ONE_SIGMA))
    free = [value.size - 1 for value in values]
    others = sum(free) - max(free, default=0)
    return VisitSpread(visit, min(_MOST_FREEDOM, _USUAL_FREEDOM + others), _drift(cells, visit, swing))


def deviations(medians: Mapping[int, float]) -> dict[int, float]:
    """How far each visit's median lies from the mean of them, as a share of it, by round."""
    mean = sum(medians.values()) / len(medians)
    return {number: median / mean - 1 for number, median in medians.items()}


def _drift(cells: Sequence[Mapping[int, float]], visit: float, swing: float) -> float:
    by_round: dict[int, list[float]] = {}
    for cell in cells:
        for number, deviation in cell.items():
            by_round.setdefault(number, []).append(deviation)
    if len(by_round) < 2:
        return 0.0
    together = float(np.std([np.median(found) for found in by_round.values()], ddof=1))
    if len(cells) < _TELLING_CELLS:
        return min(together, swing / 2)
    # The median of many cells scatters by itself, with this share of the variance of one.
    chance = math.pi / 2 / len(cells)
    return math.sqrt(max(0.0, together**2 - chance * visit**2) / (1 - chance))


NO_OTHERS = spread_of([])
"""Of a cell that stands alone."""


def estimate(visits: Sequence[Sequence[float]], spread: VisitSpread = NO_OTHERS) -> Estimate:
    """The median over all samples, with an interval whose unit is the visit.

    Two intervals are taken, and the wider end of each. One is a bootstrap over visits and over blocks of BLOCK_STEPS
    samples within them (Kalibera & Jones, ISMM'13: replicate at the level that varies; Hoefler & Belli, SC'15: medians
    with nonparametric intervals). The other is Student's t of the visits' medians, whose variance is moderated by that
    of the run's other cells (Smyth, Stat. Appl. Genet. Mol. Biol. 3(1), 2004), since two visits that happen to agree
    say little about how far visits lie apart, and from three on never below the cell's own; a drift that all cells
    share is not averaged. Raises ValueError without samples.
    """
    blocks = _blocks(visits)
    if not blocks:
        raise ValueError("no samples to estimate from")
    everything = np.concatenate([block for visit in blocks for block in visit])
    median = float(np.median(everything))
    if sum(len(visit) for visit in blocks) == 1:
        low, high = float(everything.min()), float(everything.max())
    else:
        low, high = (
            float(end) for end in np.percentile(_resampled_medians(blocks, _resamples(everything)), [2.5, 97.5])
        )
    by_visits, drift = _half_widths(blocks, spread)
    least = math.hypot(by_visits, drift)
    # However little is known of it, a time is more than nothing.
    return Estimate(median, min(low, median * math.exp(-least)), max(high, median * (1 + least)), everything.size)


def narrow_enough(time_s: Estimate, visits: int, half_width: float = TARGET_HALF_WIDTH) -> bool:
    """Whether a cell's interval, of so many visits, needs no further one."""
    return visits >= LEAST_VISITS and time_s.half_width <= half_width and time_s.samples >= LEAST_SAMPLES


def student_t(freedom: float) -> float:
    """The end of the middle 95 % of Student's t (Abramowitz & Stegun 26.7.5; 3 % short at two degrees of freedom).

    With one degree it is Cauchy's distribution, whose quantile is a tangent.
    """
    if freedom == 1:
        return math.tan(0.475 * math.pi)
    z = _Z95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def _half_widths(visits: Sequence[Sequence[NDArray[np.float64]]], spread: VisitSpread) -> tuple[float, float]:
    """Half of the interval as shares of the median: what more visits average away, and what they do not."""
    medians = np.array([statistics.median(np.concatenate(blocks).tolist()) for blocks in visits])
    free = medians.size - 1
    freedom = spread.freedom + free
    own = float(np.var(medians, ddof=1)) / float(np.median(medians)) ** 2 if free else 0.0
    moderated = (spread.freedom * spread.visit**2 + free * own) / freedom
    few = medians.size < _FEW_VISITS
    variance, inefficiency = (moderated, 1.0) if few else (max(own, moderated), _MEDIAN_OVER_MEAN)
    alone = math.sqrt(max(0.0, variance - spread.drift**2) / medians.size)
    return student_t(freedom) * inefficiency * alone, _DRIFT_COVERAGE * spread.drift


def _blocks(visits: Sequence[Sequence[float]]) -> list[list[NDArray[np.float64]]]:
    """Each visit's samples, cut into blocks of neighbours; visits without samples are left out."""
    return [
        [
            np.asarray(visit[start : start + BLOCK_STEPS], dtype=np.float64)
            for start in range(0, len(visit), BLOCK_STEPS)
        ]
        for visit in visits
        if len(visit)
    ]


def _resamples(*samples: NDArray[np.float64]) -> int:
    return RESAMPLES if sum(each.size for each in samples) < _MANY_SAMPLES else _RESAMPLES_OF_MANY


def _resampled_medians(visits: Sequence[Sequence[NDArray[np.float64]]], resamples: int) -> NDArray[np.float64]:
    """Medians of visits drawn with replacement, and of as many blocks drawn from each of them as it has."""
    blocks = [block for visit in visits for block in visit]
    counts = np.array([len(visit) for visit in visits])
    firsts = np.cumsum(counts) - counts
    rng = np.random.default_rng(_SEED)
    drawn = rng.integers(0, len(visits), size=(resamples, len(visits)))
    many = counts[drawn][:, :, None]
    picked = firsts[drawn][:, :, None] + rng.integers(0, 1 << 30, size=(*drawn.shape, int(counts.max()))) % many
    taken = np.arange(counts.max()) < many
    draws = np.arange(resamples)[:, None, None] * len(blocks) + picked
    times = np.bincount(draws[taken], minlength=resamples * len(blocks)).reshape(resamples, len(blocks))
    # All samples are sorted once; how often each was drawn then tells where a draw's middle lies.
    samples, owner = np.concatenate(blocks), np.repeat(np.arange(len(blocks)), [block.size for block in blocks])
    order = np.argsort(samples, kind="stable")
    samples, owner = samples[order], owner[order]
    medians = np.empty(resamples)
    at_once = max(1, _AT_ONCE // samples.size)
    for some in (slice(start, start + at_once) for start in range(0, resamples, at_once)):
        passed = np.cumsum(times[some, owner], axis=1)
        middle = passed[:, -1:] / 2
        below, above = (passed < middle).sum(axis=1), (passed <= middle).sum(axis=1)
        medians[some] = (samples[below] + samples[above]) / 2
    return medians


@dataclass(frozen=True)
class NoiseReport:
    """How far a cell's figure can be trusted, and why no further."""

    grade: Noise
    reasons: tuple[str, ...]


def noise_report(
    visits: Sequence[Sequence[float]],
    time_s: Estimate,
    *,
    foreign_cores: float | None = None,
    throttled: Sequence[str] = (),
    machine_drift: float = 0.0,
) -> NoiseReport:
    """Grade a cell by the width of its interval, drift between its visits, modes, outliers and disturbances.

    `time_s` is what `estimate` says of these visits; `machine_drift` is by how much a sentinel, the same work again and
    again, changed its time over the run.

    Nothing is thrown away: a disturbed cell keeps all its samples and says what is wrong with them.
    """
    half_width = time_s.half_width
    reasons = []
    count = sum(len(visit) for visit in visits)
    if len(visits) == 1:
        reasons.append(VISITED_ONCE)
    elif half_width > _QUIET_HALF_WIDTH:
        reasons.append(f"interval of +-{100 * half_width:.1f} %")
    if count < LEAST_SAMPLES:
        reasons.append("a single sample" if count == 1 else f"only {count} samples")
    medians = [statistics.median(visit) for visit in visits if len(visit)]
    drift = max(medians) / min(medians) - 1
    if drift > _DRIFT:
        reasons.append(f"drift of {100 * drift:.0f} % between rounds")
    samples = np.concatenate([np.asarray(visit, dtype=np.float64) for visit in visits])
    if (modes := two_modes(samples)) is not None:
        reasons.append(f"two modes, {1e3 * modes[0]:.3g} and {1e3 * modes[1]:.3g} ms")
    far = outliers(samples)
    if far > _MANY_OUTLIERS * samples.size:
        reasons.append(f"{far} outliers in {samples.size} samples")
    if foreign_cores is not None and foreign_cores > MOST_FOREIGN_CORES:
        reasons.append(f"others kept {foreign_cores:.1f} cores busy")
    if machine_drift > _MACHINE_DRIFT:
        reasons.append(f"the machine itself drifted by {100 * machine_drift:.0f} %")
    reasons += [f"throttled ({name})" for name in throttled]
    if math.isfinite(half_width) and half_width > _USABLE_HALF_WIDTH:
        return NoiseReport("unusable", tuple(reasons))
    return NoiseReport("noisy" if reasons else "quiet", tuple(reasons))


def outliers(samples: NDArray[np.float64]) -> int:
    """Samples whose modified z-score exceeds 14.8 (hyperfine's threshold)."""
    deviations = np.abs(samples - np.median(samples))
    sigma = 1.4826 * np.median(deviations)
    return int((deviations > _OUTLIER_Z * sigma).sum()) if sigma > 0 else 0


def two_modes(samples: NDArray[np.float64]) -> tuple[float, float] | None:
    """The centres of two clearly separate groups of samples, or None."""
    ordered = np.sort(samples)
    least = max(2, math.ceil(_MODE_SHARE * ordered.size))
    if ordered.size < _FEWEST_FOR_MODES:
        return None
    gaps = np.diff(ordered)[least - 1 : ordered.size - least]
    cut = least + int(np.argmax(gaps))
    low, high = ordered[:cut], ordered[cut:]
    distance = float(np.median(high) - np.median(low))
    spread = max(float(np.std(low)), float(np.std(high)))
    apart = distance > _MODE_DISTANCE * float(np.median(ordered)) and distance > _MODE_SPREADS * spread
    return (float(np.median(low)), float(np.median(high))) if apart else None


def difference(
    left: Sequence[Sequence[float]], right: Sequence[Sequence[float]], spread: VisitSpread = NO_OTHERS
) -> Estimate:
    """median(left) - median(right) with a 95 % interval; both are resampled and widened as in `estimate`.

    Both were visited in turn, so that a drift of the machine falls on both alike.
    """
    sides = [_blocks(left), _blocks(right)]
    everything = [np.concatenate([block for visit in side for block in visit]) for side in sides]
    lefts, rights = (_resampled_medians(side, _resamples(*everything)) for side in sides)
    medians = [float(np.median(samples)) for samples in everything]
    low, high = np.percentile(lefts - rights[::-1], [2.5, 97.5])
    middle = medians[0] - medians[1]
    together = replace(spread, drift=0.0)
    least = math.hypot(*(_half_widths(side, together)[0] * median for median, side in zip(medians, sides, strict=True)))
    return Estimate(
        middle, min(float(low), middle - least), max(float(high), middle + least), min(s.size for s in everything)
    )


NANOSECOND_S = 1e-9
NOTCH = 1.57
"""Half the notch of a box plot over IQR / sqrt(n)."""


@dataclass(frozen=True)
class Timing:
    """A median of measured seconds, and how far it may be off."""

    median_s: float
    half_width_s: float
    """Half of the notch of a box plot, 1.57 IQR / sqrt(n): an interval of about 95 % for a median (McGill, Tukey and
    Larsen, The American Statistician 32, 1978)."""

    def times(self, count: int) -> Timing:
        """The time of `count` such calls."""
        return Timing(count * self.median_s, count * self.half_width_s)


NOTHING = Timing(0.0, 0.0)


def timing_of(samples: Sequence[float]) -> Timing:
    """The median of `samples` seconds with its half-width; that of a single one is not known and given as 0."""
    median_s = statistics.median(samples)
    if len(samples) < 2:
        return Timing(median_s, 0.0)
    low, _, high = statistics.quantiles(samples, n=4)
    return Timing(median_s, NOTCH * (high - low) / math.sqrt(len(samples)))


@dataclass(frozen=True)
class Undisturbed:
    """The lowest quartile of seconds that were measured for a moment (of four the least): a neighbour makes some of
    them slower, and none of them faster."""

    quartile_s: float
    half_width_s: float
    """The half-width of their median (see `Timing`)."""


def undisturbed(samples: Sequence[float]) -> Undisturbed:
    """What parts and trials take where no neighbour is in their way."""
    return Undisturbed(sorted(samples)[(len(samples) - 1) // 4], timing_of(samples).half_width_s)


SAME = 0.03
"""A change whose whole interval is smaller than this is none."""


def change_verdict(low: float, high: float) -> ChangeVerdict:
    """What a change claims whose 95 % interval, of after / before - 1, is this."""
    if low > 0:
        return "slower"
    if high < 0:
        return "faster"
    return "same" if low >= -SAME and high <= SAME else "inconclusive"


ChangeVerdict = Literal["slower", "faster", "same", "inconclusive"]
