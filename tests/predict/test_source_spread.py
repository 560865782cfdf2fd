"""The spread over sources, compared with textbook figures and with simulated sources."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.published_fit import NO_SOURCES, PRIOR_SOURCES, SourceSpread


def test_by_hand() -> None:
    """Two sources at 0.1 and 0.3 on a prior of one at 0 with variance 0.04.

    Mean (0 + 0.1 + 0.3) / 3; variance (0.04 + 2 * 0.1**2 + 1 * 2 / 3 * 0.2**2) / 3; t(3) = 2.353 for nine in ten.
    """
    spread = SourceSpread(0.0, 0.04, 1.0).narrowed([("a", 0.1), ("b", 0.3)])
    assert spread.mean == pytest.approx(0.4 / 3)
    assert spread.variance == pytest.approx((0.04 + 0.02 + 0.08 / 3) / 3)
    assert spread.sources == 3
    low, high = spread.interval(0.9)
    assert high - low == pytest.approx(2 * 2.353 * math.sqrt(spread.variance * 4 / 3), rel=0.01)


def test_a_source_with_many_figures_counts_as_one() -> None:
    few = NO_SOURCES.narrowed([("a", 0.2), ("b", -0.1)])
    many = NO_SOURCES.narrowed([("a", 0.2)] * 50 + [("b", -0.1)])
    assert (many.mean, many.variance, many.sources) == pytest.approx((few.mean, few.variance, few.sources))
    assert NO_SOURCES.narrowed([]) is NO_SOURCES


def test_a_wide_group_weighs_as_few_sources_of_a_narrow_one() -> None:
    wide = NO_SOURCES.narrowed((f"{source}", 0.5) for source in range(100))
    assert wide.narrowed([("a", 0.0)]).sources == PRIOR_SOURCES + 1


@pytest.mark.parametrize("sources", [3, 6, 12])
def test_nine_in_ten_figures_of_new_sources_are_inside(sources: int) -> None:
    """Sources differ by 20 %, and their figures by 10 % more; 600 draws of sources, each with a figure of a new one."""
    rng = np.random.default_rng(7)
    inside = 0
    for _ in range(600):
        seen = [
            (f"{source}", float(offset + rng.normal(0, 0.1)))
            for source, offset in enumerate(rng.normal(0, 0.2, sources))
            for _ in range(int(rng.integers(1, 12)))
        ]
        low, high = NO_SOURCES.narrowed(seen).interval(0.9)
        inside += low <= rng.normal(0, 0.2) + rng.normal(0, 0.1) <= high
    assert 0.87 <= inside / 600 <= 0.99
