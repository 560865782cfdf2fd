"""From raw samples to a median with its interval, and when there are enough of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Noise = Literal["quiet", "noisy", "unusable"]

BLOCK_STEPS = 8
"""Decode steps of one loop that are resampled together, since neighbours are not independent."""

_RESAMPLES = 2000
_SEED = 0

# A cell is quiet when its interval is narrow enough to tell 5 % apart, and unusable when a fifth hides in it.
_QUIET_HALF_WIDTH = 0.025
_USABLE_HALF_WIDTH = 0.10
# Rounds whose medians differ by more than this have drifted (Section 8 of common practice: 3 % between blocks).
_DRIFT = 0.05


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


def estimate(visits: Sequence[Sequence[float]]) -> Estimate:
    """The median over all samples, with a bootstrap interval over blocks.

    A visit's samples are neighbours in time; they are cut into blocks of BLOCK_STEPS and whole blocks are resampled
    (Hoefler & Belli, SC'15: report medians with nonparametric intervals; a moving block for autocorrelated samples).
    Raises ValueError without samples.
    """
    blocks = [
        np.asarray(visit[start : start + BLOCK_STEPS], dtype=np.float64)
        for visit in visits
        for start in range(0, len(visit), BLOCK_STEPS)
    ]
    if not blocks:
        raise ValueError("no samples to estimate from")
    everything = np.concatenate(blocks)
    median = float(np.median(everything))
    if len(blocks) == 1:
        return Estimate(median, float(everything.min()), float(everything.max()), everything.size)
    # Each row is one resample of blocks; short blocks are padded with NaN so that one call takes all medians.
    width = max(block.size for block in blocks)
    padded = np.full((len(blocks), width), np.nan)
    for row, block in zip(padded, blocks, strict=True):
        row[: block.size] = block
    picks = np.random.default_rng(_SEED).integers(0, len(blocks), size=(_RESAMPLES, len(blocks)))
    medians = np.nanmedian(padded[picks].reshape(_RESAMPLES, -1), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Estimate(median, float(low), float(high), everything.size)


def noise_grade(visits: Sequence[Sequence[float]]) -> Noise:
    """How far a cell's figure can be trusted: by the width of its interval and the drift between its visits."""
    half_width = estimate(visits).half_width
    if half_width > _USABLE_HALF_WIDTH and math.isfinite(half_width):
        return "unusable"
    medians = [float(np.median(visit)) for visit in visits if len(visit)]
    drifted = max(medians) / min(medians) - 1 > _DRIFT
    return "quiet" if half_width <= _QUIET_HALF_WIDTH and not drifted else "noisy"
