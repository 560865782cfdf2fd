"""All statistics: medians with intervals, drift, noise, and when there are enough samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from profiler.units import several

Noise = Literal["quiet", "noisy", "unusable"]

TARGET_HALF_WIDTH = 0.02
"""Half-width of a 95 % interval, as a share of its median, at which a cell needs no further repetition."""

LEAST_REPETITIONS = 4
"""Least repetitions before a cell is done; stopping at two or three would select repetitions that agree by chance."""

CLAIM_REPETITIONS = 2
"""Least repetitions of each side of a claimed difference; one repetition does not show how much repetitions of a cell
differ."""

BLOCK_STEPS = 8
"""Decode steps of one loop that are resampled as a block, since neighbours are not independent."""

LEAST_SAMPLES = 6
"""Least samples with a distribution-free 95 % interval of the median (order statistics: 2 x 0.5^6 = 3 %)."""

ONE_REPETITION = "one repetition, so its interval covers only the variation within it"
"""The reason for noise if differences between repetitions are unknown."""

RESAMPLES = 1000
# So many samples narrow a bootstrap interval far below the spread of repetitions; then the interval of medians decides.
_MANY_SAMPLES = 20_000
_RESAMPLES_OF_MANY = 100
# Samples processed together over all resamples; more do not fit a cache.
_AT_ONCE = 1 << 17
_SEED = 0

# The share of a normal distribution within one standard deviation, and the ends of its middle 90 % and 95 %.
_ONE_SIGMA = 0.683
NORMAL_90, NORMAL_95 = 1.645, 1.96
MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution / its median absolute deviation."""
# Six repetitions with a standard deviation of 1 % (evenly spaced quantiles of a normal distribution). In six runs on
# two cores of a shared Xeon, that of repetitions of a cell was 0.8 to 2.0 %, half of them below 1.2; other machines had
# up to 3.
_USUAL_REPETITIONS = 0.01 * np.array([-1.38, -0.67, -0.21, 0.21, 0.67, 1.38])
# Degrees of freedom of the usual spread; machines differ in it by a factor of three.
_USUAL_FREEDOM = 2.0
# Most degrees of freedom from a run's other cells, since not all cells scatter alike.
_MOST_FREEDOM = 10.0
# Spread of the median of normal repetitions over that of their mean: 1.09 for four, 1.14 for six, and this in the
# limit. For one and two repetitions both are the same, and two repetitions do not determine their spread.
_MEDIAN_OVER_MEAN = math.sqrt(math.pi / 2)
_FEW_REPETITIONS = 3
# From this many cells on, a run shows the common drift of its cells.
_DRIFT_CELLS = 8
# Distance of the rounds' mean from the middle of a slow drift, in standard deviations between rounds. If a run covers
# half a wave, 1.9 to 2.0 of them include nine phases of ten (four to six rounds).
_DRIFT_COVERAGE = 2.2

# A cell is quiet if its interval is narrow enough to show 5 %, and unusable if it is wider than a fifth.
_QUIET_HALF_WIDTH = 0.025
_USABLE_HALF_WIDTH = 0.10
# Rounds whose medians differ by more than this have drifted.
_DRIFT = 0.05
# If the drift probe changes by more than this during a run, its cells are not comparable.
_MACHINE_DRIFT = 0.05
# hyperfine's threshold of the modified z-score for outliers (|x - median| / MAD, MAD scaled to sigma).
_OUTLIER_Z = 14.8
_MANY_OUTLIERS = 0.05
# Load of others on this process's cores, in cores, above which it was slowed down.
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
class RepetitionSpread:
    """The spread between repetitions of one cell in a run, as shares of its time."""

    repetition: float
    """One standard deviation between repetitions."""
    freedom: float
    """Degrees of freedom of `repetition`, in addition to those of the cell's repetitions."""
    drift: float = 0.0
    """One standard deviation of the common drift of all cells between rounds; more repetitions do not average it
    away."""


def repetition_modes(of_cells: Iterable[Mapping[int, float]]) -> tuple[float, float] | None:
    """Return the two modes of a machine in each cell's medians by round, relative to the cell's fastest repetition."""
    ratios = [median / min(cell.values()) for cell in of_cells if len(cell) > 1 for median in cell.values()]
    return machine_modes(np.array(ratios), share=0.1, fewest=8)


def two_modes(
    samples: NDArray[np.float64], *, share: float = 0.2, fewest: int = 16, apart: float = 0.1, spreads: float = 4.0
) -> tuple[float, float] | None:
    """Return the medians of two groups of samples, each with a `share` of them; None if there are none, or too few.

    They are more than `apart` of the median of all, and `spreads` standard deviations of the wider group, apart.
    """
    ordered = np.sort(samples)
    least = max(2, math.ceil(share * ordered.size))
    if ordered.size < fewest:
        return None
    gaps = np.diff(ordered)[least - 1 : ordered.size - least]
    cut = least + int(np.argmax(gaps))
    low, high = ordered[:cut], ordered[cut:]
    distance = float(np.median(high) - np.median(low))
    spread = max(float(np.std(low)), float(np.std(high)))
    separate = distance > apart * float(np.median(ordered)) and distance > spreads * spread
    return (float(np.median(low)), float(np.median(high))) if separate else None


machine_modes = partial(two_modes, apart=0.4, spreads=6.0)
"""Two modes of a whole machine, by stricter limits: by chance, repetitions that differ by 10 % have them in 1 % of
runs."""


def spread_of(of_cells: Iterable[Mapping[int, float]], swing: float = 0.0) -> RepetitionSpread:
    """Return the spread of repetitions in a run, from each cell's medians by round.

    The spread is a pooled estimate (JCGM 100:2008, 4.2.4): each cell has few repetitions, but the run has many. It is
    the distance from the mean within which two thirds of the repetitions are, so a few disturbed cells do not widen the
    others. A few virtual repetitions with the usual spread prevent two real ones from deciding for all. Two modes of
    the machine count with their distance, since the few repetitions of a cell may have met only one.

    Eight or more cells show a drift of the machine as the common part of their repetitions. Fewer cells cannot
    distinguish drift from the spread of repetitions, so their drift counts only as far as the drift probe shows it.
    `swing` is the probe's change over the run, as a share.
    """
    of_cells = [medians for medians in of_cells if len(medians) > 1]
    cells = list(map(deviations, of_cells))
    values = [np.fromiter(cell.values(), dtype=np.float64) for cell in cells]
    scaled = [value * math.sqrt(value.size / (value.size - 1)) for value in values]
    repetition = float(np.quantile(np.abs(np.concatenate([*scaled, _USUAL_REPETITIONS])), _ONE_SIGMA))
    if modes := repetition_modes(of_cells):
        repetition = max(repetition, (modes[1] - modes[0]) / (modes[1] + modes[0]))  # of two equally frequent times
    free = [value.size - 1 for value in values]
    others = sum(free) - max(free, default=0)
    return RepetitionSpread(repetition, min(_MOST_FREEDOM, _USUAL_FREEDOM + others), _drift(cells, repetition, swing))


def deviations(medians: Mapping[int, float]) -> dict[int, float]:
    """Return each repetition's median relative to the mean of all medians, minus 1, by round."""
    mean = sum(medians.values()) / len(medians)
    return {number: median / mean - 1 for number, median in medians.items()}


def _drift(cells: Sequence[Mapping[int, float]], repetition: float, swing: float) -> float:
    by_round: dict[int, list[float]] = {}
    for cell in cells:
        for number, deviation in cell.items():
            by_round.setdefault(number, []).append(deviation)
    if len(by_round) < 2:
        return 0.0
    common = float(np.std([np.median(round_deviations) for round_deviations in by_round.values()], ddof=1))
    if len(cells) < _DRIFT_CELLS:
        return min(common, swing / 2)
    # Even without drift the median of many cells has a variance, of this share of one cell's.
    chance = math.pi / 2 / len(cells)
    return math.sqrt(max(0.0, common**2 - chance * repetition**2) / (1 - chance))


NO_OTHERS = spread_of([])
"""The spread for a cell without other cells."""


def estimate(repetitions: Sequence[Sequence[float]], spread: RepetitionSpread = NO_OTHERS) -> Estimate:
    """Return the median over all samples, with a 95 % interval that reflects the spread between repetitions.

    The interval is the union of two. One is a bootstrap over repetitions and over blocks of BLOCK_STEPS samples within
    them (Kalibera & Jones, ISMM'13: replicate at the level that varies; Hoefler & Belli, SC'15: medians with
    nonparametric intervals). The other is Student's t of the repetitions' medians. Its variance is moderated by that of
    the run's other cells (Smyth, Stat. Appl. Genet. Mol. Biol. 3(1), 2004), since two repetitions may agree by chance.
    From three repetitions on, it is at least the cell's own variance. A common drift of all cells is not averaged away.

    Raises ValueError without samples.
    """
    blocks = _blocks(repetitions)
    everything = np.concatenate([block for repetition in blocks for block in repetition])
    median = float(np.median(everything))
    if sum(len(repetition) for repetition in blocks) == 1:
        low, high = float(everything.min()), float(everything.max())
    else:
        resamples = RESAMPLES if everything.size < _MANY_SAMPLES else _RESAMPLES_OF_MANY
        low, high = np.percentile(_resampled_medians(blocks, resamples), [2.5, 97.5]).tolist()
    least = _half_width(blocks, spread)
    # The lower end is exponential, since a time is positive.
    return Estimate(median, min(low, median * math.exp(-least)), max(high, median * (1 + least)), everything.size)


def samples_for(percent: float) -> int:
    """Return the fewest samples of which one lies beyond this percentile: 10 for p90, 100 for p99."""
    return math.ceil(round(100 / (100 - percent), 6))


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated linearly; NaN with fewer than `samples_for(percent)` samples."""
    return float(np.percentile(samples, percent)) if len(samples) >= samples_for(percent) else math.nan


def narrow_enough(time: Estimate, repetitions: int) -> bool:
    """Return whether a cell's interval after `repetitions` repetitions needs no further one."""
    return repetitions >= LEAST_REPETITIONS and time.half_width <= TARGET_HALF_WIDTH and time.samples >= LEAST_SAMPLES


def student_t(freedom: float, share: float = 0.95) -> float:
    """Return the half width that contains `share` of Student's t with `freedom` degrees of freedom."""
    if freedom == 1:  # Cauchy's distribution
        return math.tan(share / 2 * math.pi)
    z = statistics.NormalDist().inv_cdf((1 + share) / 2)
    terms = (  # Abramowitz & Stegun 26.7.5, which is 3 % too low at two degrees
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def _half_width(repetitions: Sequence[Sequence[NDArray[np.float64]]], spread: RepetitionSpread) -> float:
    medians = np.array([statistics.median(np.concatenate(blocks).tolist()) for blocks in repetitions])
    free = medians.size - 1
    freedom = spread.freedom + free
    own = float(np.var(medians, ddof=1)) / float(np.median(medians)) ** 2 if free else 0.0
    moderated = (spread.freedom * spread.repetition**2 + free * own) / freedom
    few = medians.size < _FEW_REPETITIONS
    variance, inefficiency = (moderated, 1.0) if few else (max(own, moderated), _MEDIAN_OVER_MEAN)
    error = math.sqrt(max(0.0, variance - spread.drift**2) / medians.size)
    return math.hypot(student_t(freedom) * inefficiency * error, _DRIFT_COVERAGE * spread.drift)


def _blocks(repetitions: Sequence[Sequence[float]]) -> list[list[NDArray[np.float64]]]:
    """The samples of each repetition in blocks of neighbours, or one by one where there is less than a block."""
    blocks = []
    for samples in filter(len, repetitions):
        size = BLOCK_STEPS if len(samples) >= BLOCK_STEPS else 1  # as one block, their spread would be in no interval
        starts = range(0, len(samples), size)
        blocks.append([np.asarray(samples[start : start + size], dtype=np.float64) for start in starts])
    return blocks


def _resampled_medians(repetitions: Sequence[Sequence[NDArray[np.float64]]], resamples: int) -> NDArray[np.float64]:
    """Medians of resamples: repetitions drawn with replacement, and from each drawn repetition as many blocks as it
    has."""
    blocks = [block for repetition in repetitions for block in repetition]
    counts = np.array([len(repetition) for repetition in repetitions])
    firsts = np.cumsum(counts) - counts
    rng = np.random.default_rng(_SEED)
    drawn = rng.integers(0, len(repetitions), size=(resamples, len(repetitions)))
    many = counts[drawn][:, :, None]
    picked = firsts[drawn][:, :, None] + rng.integers(0, 1 << 30, size=(*drawn.shape, int(counts.max()))) % many
    taken = np.arange(counts.max()) < many
    draws = np.arange(resamples)[:, None, None] * len(blocks) + picked
    times = np.bincount(draws[taken], minlength=resamples * len(blocks)).reshape(resamples, len(blocks))
    # All samples are sorted once; the counts of draws then give the middle of each resample.
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
    """The noise grade of a cell's time, and its reasons."""

    grade: Noise
    reasons: tuple[str, ...]


def noise_report(
    repetitions: Sequence[Sequence[float]],
    time_s: Estimate,
    *,
    foreign_cores: float | None = None,
    throttled: Sequence[str] = (),
    machine_drift: float = 0.0,
) -> NoiseReport:
    """Grade a cell, with all its samples, by its interval, drift, modes, outliers and disturbances."""
    half_width = time_s.half_width
    reasons = []
    count = sum(len(repetition) for repetition in repetitions)
    if len(repetitions) == 1:
        reasons.append(ONE_REPETITION)
    elif half_width > _QUIET_HALF_WIDTH:
        reasons.append(f"time known to within {100 * half_width:.1f} %")
    if count < LEAST_SAMPLES:
        reasons.append("a single sample" if count == 1 else f"only {count} samples")
    medians = [statistics.median(repetition) for repetition in repetitions if len(repetition)]
    drift = max(medians) / min(medians) - 1
    if drift > _DRIFT:
        reasons.append(f"drift of {100 * drift:.0f} % between rounds")
    samples = np.concatenate([np.asarray(repetition, dtype=np.float64) for repetition in repetitions])
    if (modes := two_modes(samples)) is not None:
        reasons.append(f"two modes, {1e3 * modes[0]:.3g} and {1e3 * modes[1]:.3g} ms")
    outlier_count = outliers(samples)
    if outlier_count > _MANY_OUTLIERS * samples.size:
        reasons.append(f"{several(outlier_count, 'outlier', 'outliers')} in {samples.size} samples")
    if foreign_cores is not None and foreign_cores > MOST_FOREIGN_CORES:
        reasons.append(f"others kept {foreign_cores:.1f} cores busy")
    if machine_drift > _MACHINE_DRIFT:
        reasons.append(f"the machine itself drifted by {100 * machine_drift:.0f} %")
    reasons += [f"throttled ({name})" for name in throttled]
    if math.isfinite(half_width) and half_width > _USABLE_HALF_WIDTH:
        return NoiseReport("unusable", tuple(reasons))
    return NoiseReport("noisy" if reasons else "quiet", tuple(reasons))


def outliers(samples: NDArray[np.float64]) -> int:
    """Return the number of samples with a modified z-score above 14.8 (hyperfine's threshold)."""
    deviations = np.abs(samples - np.median(samples))
    sigma = MAD_TO_SIGMA * np.median(deviations)
    return int((deviations > _OUTLIER_Z * sigma).sum()) if sigma > 0 else 0


NANOSECOND_S = 1e-9
NOTCH = 1.57
"""Half of a box plot's notch, in units of IQR / sqrt(n)."""


@dataclass(frozen=True)
class Timing:
    """A median of measured seconds, and the half-width of its interval."""

    median_s: float
    half_width_s: float
    """Half of the notch of a box plot, 1.57 IQR / sqrt(n): an interval of about 95 % for a median (McGill, Tukey and
    Larsen, The American Statistician 32, 1978)."""

    def times(self, count: int) -> Timing:
        """Return the time of `count` such calls."""
        return Timing(count * self.median_s, count * self.half_width_s)


NOTHING = Timing(0.0, 0.0)


def timing_of(samples: Sequence[float]) -> Timing:
    """Return the median of `samples` in seconds, with its half-width; 0 for a single sample, where it is unknown."""
    median_s = statistics.median(samples)
    if len(samples) < 2:
        return Timing(median_s, 0.0)
    low, _, high = statistics.quantiles(samples, n=4)
    return Timing(median_s, NOTCH * (high - low) / math.sqrt(len(samples)))


@dataclass(frozen=True)
class LowerQuartile:
    """The lower quartile of short measurements in seconds (the least of four), since contention only adds time."""

    quartile_s: float
    half_width_s: float
    """Half-width of the interval of their median (see `Timing`)."""


def undisturbed(samples: Sequence[float]) -> LowerQuartile:
    """Return the lower quartile of `samples`, which estimates their time without contention."""
    return LowerQuartile(sorted(samples)[(len(samples) - 1) // 4], timing_of(samples).half_width_s)
