"""Medians, intervals and grades, against what statistics says they must be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from profiler.timing.sampling import estimate, noise_grade


def test_median_of_all_samples() -> None:
    assert estimate([[1.0, 3.0], [2.0]]).median_s == 2.0
    assert estimate([[1.0, 3.0], [2.0]]).samples == 3


def test_one_sample_has_no_known_width() -> None:
    assert math.isinf(estimate([[1.0]]).half_width)


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        estimate([])


def test_interval_covers_the_true_median_about_95_times_in_100() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        visits = [list(rng.normal(1.0, 0.05, 8)) for _ in range(12)]
        found = estimate(visits)
        hits += found.low_s <= 1.0 <= found.high_s
    assert 0.88 <= hits / 200 <= 0.99


def test_steps_of_one_loop_are_not_counted_as_independent() -> None:
    """A shift between loops must widen the interval, however many steps each loop has."""
    shifted = [[1.0 + 0.1 * (loop % 2)] * 8 for loop in range(6)]
    assert estimate(shifted).half_width > 0.02


def test_grades() -> None:
    rng = np.random.default_rng(2)
    quiet = [list(rng.normal(1.0, 0.003, 30)) for _ in range(3)]
    assert noise_grade(quiet) == "quiet"
    assert noise_grade([quiet[0], [1.1 * value for value in quiet[1]]]) == "noisy"  # drift of 10 %
    assert noise_grade([list(rng.lognormal(0, 0.8, 8)) for _ in range(2)]) == "unusable"
    assert noise_grade([[1.0]]) == "noisy"
