"""Bars of the time breakdown: terms to scale, positive ones right of zero, negative ones left of it."""

from __future__ import annotations

import pytest
from made_runs import key, result

from profiler.report.time_breakdown import breakdown_bars


def test_negative_terms_are_left_of_zero() -> None:
    cell = result(key(), 1.0, weights_s=1.1, kernel_s=-0.02, unexplained_s=-0.08)
    [bar] = breakdown_bars([cell], 8)
    spans = {item.term: (item.start, item.end) for item in bar.segments}
    assert spans["weights_s"] == (0.0, pytest.approx(1.1))
    assert spans["kernel_s"] == (pytest.approx(-0.02), pytest.approx(0.0))
    assert spans["unexplained_s"] == (pytest.approx(-0.10), pytest.approx(-0.02))
    assert sum(item.share for item in bar.segments) == pytest.approx(1.0)
    assert bar.below_zero == "unexplained -8 %"


def test_a_tiny_negative_term_is_not_mentioned() -> None:
    [bar] = breakdown_bars([result(key(), 1.0, weights_s=1.005, unexplained_s=-0.005)], 8)
    assert bar.below_zero == ""


def test_parts_of_more_than_twice_the_time_are_not_drawn() -> None:
    """A cell took 357 ms, but its kernels took 3.8 s when they were measured later, while other work ran."""
    cell = result(key(), 0.357, kernel_s=3.8, unexplained_s=0.357 - 3.8)
    assert breakdown_bars([cell], 8) == []
