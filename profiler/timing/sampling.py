"""From raw samples to a median with its interval, and when there are enough of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Noise = Literal["quiet", "noisy", "unusable"]

TARGET_HALF_WIDTH = 0.02
"""Of a 95 % interval, as a share of its median: narrower than this, a cell needs no further visit."""

BLOCK_STEPS = 8
"""Decode steps of one loop that are resampled together, since neighbours are not independent."""

LEAST_SAMPLES = 6
"""Fewer samples have no distribution-free 95 % interval of their median (order statistics: 2 x 0.5^6 = 3 %)."""

_RESAMPLES = 2000
_SEED = 0

# Two standard uncertainties are an expanded one, about 95 % (JCGM 100:2008, 6.2).
_COVERAGE = 2.0
# The share of a normal distribution within one standard deviation.
_ONE_SIGMA = 0.683
# Six visits with a standard deviation of 1 % (evenly spaced quantiles of a normal distribution): over six runs on two
# cores of a shared Xeon that of visits of a cell was 0.8 to 2.0 %, half of them below 1.2.
_USUAL_VISITS = 0.01 * np.array([-1.38, -0.67, -0.21, 0.21, 0.67, 1.38])

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
_FOREIGN_CORES = 0.15


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


def estimate(visits: Sequence[Sequence[float]], visit_sigma: float = 0.0) -> Estimate:
    """The median over all samples, with a bootstrap interval over visits and over blocks of neighbours within them.

    Whole visits are drawn first and then blocks of BLOCK_STEPS samples of each, so that what differs from visit to
    visit is not taken for more samples of the same (Kalibera & Jones, ISMM'13: replicate at the level that varies;
    Hoefler & Belli, SC'15: medians with nonparametric intervals). Two or three visits that happen to agree say little
    about how far visits lie apart: `visit_sigma` is what all cells of the run say (see there), and the interval is no
    narrower than that allows. Raises ValueError without samples.
    """
    blocks = _blocks(visits)
    if not blocks:
        raise ValueError("no samples to estimate from")
    everything = np.concatenate([block for visit in blocks for block in visit])
    median = float(np.median(everything))
    if sum(len(visit) for visit in blocks) == 1:
        low, high = float(everything.min()), float(everything.max())
    else:
        low, high = (float(end) for end in np.percentile(_resampled_medians(blocks), [2.5, 97.5]))
    least = _COVERAGE * visit_sigma / math.sqrt(len(blocks)) * median
    return Estimate(median, min(low, median - least), max(high, median + least), everything.size)


def deviations(visits: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """How far each visit's median lies from the mean of them, as a share of it; nothing for fewer than two visits.

    Scaled by sqrt(n / (n - 1)), so that their mean square is the variance of single visits.
    """
    medians = np.array([np.median(visit) for visit in visits if len(visit)])
    if medians.size < 2:
        return np.empty(0)
    shares: NDArray[np.float64] = (medians / medians.mean() - 1) * math.sqrt(medians.size / (medians.size - 1))
    return shares


def visit_sigma(of_cells: Iterable[NDArray[np.float64]]) -> float:
    """One standard deviation between visits of the same cell, as a share, from the `deviations` of all cells of a run.

    A pooled estimate (JCGM 100:2008, 4.2.4): each cell has few visits, the run has many. It is the distance within
    which two thirds of the visits lie, so that a few disturbed cells do not widen all the others. Where hardly anything
    was visited twice, a few imagined visits with the usual spread keep two real ones from deciding for all.
    """
    pooled = np.concatenate([*of_cells, _USUAL_VISITS])
    return float(np.quantile(np.abs(pooled), _ONE_SIGMA))


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


def _resampled_medians(visits: Sequence[Sequence[NDArray[np.float64]]]) -> NDArray[np.float64]:
    # Padded with NaN to [visits, blocks, samples], so that one call takes all medians.
    most = max(len(blocks) for blocks in visits)
    width = max(block.size for blocks in visits for block in blocks)
    padded = np.full((len(visits), most, width), np.nan)
    counts = np.array([len(blocks) for blocks in visits])
    for row, blocks in zip(padded, visits, strict=True):
        for cells, block in zip(row, blocks, strict=False):
            cells[: block.size] = block
    rng = np.random.default_rng(_SEED)
    drawn = rng.integers(0, len(visits), size=(_RESAMPLES, len(visits)))
    within = rng.integers(0, 1 << 30, size=(_RESAMPLES, len(visits), most)) % counts[drawn][:, :, None]
    # A visit with fewer blocks gives only as many.
    taken = padded[drawn[:, :, None], within]
    taken[np.arange(most)[None, None, :] >= counts[drawn][:, :, None]] = np.nan
    medians: NDArray[np.float64] = np.nanmedian(taken.reshape(_RESAMPLES, -1), axis=1)
    return medians


@dataclass(frozen=True)
class NoiseReport:
    """How far a cell's figure can be trusted, and why no further."""

    grade: Noise
    reasons: tuple[str, ...]


def noise_report(
    visits: Sequence[Sequence[float]],
    *,
    foreign_cores: float | None = None,
    throttled: Sequence[str] = (),
    machine_drift: float = 0.0,
    visit_sigma: float = 0.0,
) -> NoiseReport:
    """Grade a cell by the width of its interval, drift between its visits, modes, outliers and disturbances.

    `machine_drift` is by how much a sentinel, the same work again and again, changed its time over the run.

    Nothing is thrown away: a disturbed cell keeps all its samples and says what is wrong with them.
    """
    half_width = estimate(visits, visit_sigma).half_width
    reasons = []
    count = sum(len(visit) for visit in visits)
    if count < LEAST_SAMPLES:
        reasons.append("a single sample" if count == 1 else f"only {count} samples")
    elif half_width > _QUIET_HALF_WIDTH:
        reasons.append(f"interval of +-{100 * half_width:.1f} %")
    medians = [float(np.median(visit)) for visit in visits if len(visit)]
    drift = max(medians) / min(medians) - 1
    if drift > _DRIFT:
        reasons.append(f"drift of {100 * drift:.0f} % between rounds")
    samples = np.concatenate([np.asarray(visit, dtype=np.float64) for visit in visits])
    if (modes := two_modes(samples)) is not None:
        reasons.append(f"two modes, {1e3 * modes[0]:.3g} and {1e3 * modes[1]:.3g} ms")
    far = outliers(samples)
    if far > _MANY_OUTLIERS * samples.size:
        reasons.append(f"{far} outliers in {samples.size} samples")
    if foreign_cores is not None and foreign_cores > _FOREIGN_CORES:
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


def difference(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]], visit_sigma: float = 0.0) -> Estimate:
    """median(left) - median(right) with a 95 % interval; both are resampled and widened as in `estimate`."""
    sides = [_blocks(left), _blocks(right)]
    lefts, rights = (_resampled_medians(side) for side in sides)
    everything = [np.concatenate([block for visit in side for block in visit]) for side in sides]
    medians = [float(np.median(samples)) for samples in everything]
    low, high = np.percentile(lefts - rights[::-1], [2.5, 97.5])
    middle = medians[0] - medians[1]
    least = (
        _COVERAGE
        * visit_sigma
        * math.hypot(*(median / math.sqrt(len(side)) for median, side in zip(medians, sides, strict=True)))
    )
    return Estimate(
        middle, min(float(low), middle - least), max(float(high), middle + least), min(s.size for s in everything)
    )
