"""Bars of the time breakdown: terms to scale, positive ones right of zero, negative ones left of it."""

from __future__ import annotations

import pytest
from made_runs import key, result, whole_run

from profiler.report.time_breakdown import breakdown_bars


def test_terms_are_shares_of_the_time() -> None:
    """A cell takes 2 s: 1 s of weights, 0.5 s of arithmetic and 0.5 s of dispatch."""
    [bar] = breakdown_bars([result(key(), 2.0, weights_s=1.0, compute_s=0.5, dispatch_s=0.5)], 8)
    drawn = [(item.name, item.start, item.end) for item in bar.segments if item.share]
    assert drawn == [("weights", 0.0, 0.5), ("arithmetic", 0.5, 0.75), ("dispatch", 0.75, 1.0)]
    assert (bar.name, bar.below_zero) == ("decode 1 x 64", "")


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


def test_every_measured_step_is_split_whole() -> None:
    bars = breakdown_bars(whole_run().measured, 100)
    assert len(bars) == 32
    for bar in bars:
        assert sum(item.share for item in bar.segments) == pytest.approx(1.0)


def test_parts_of_more_than_twice_the_time_are_not_drawn() -> None:
    """A cell took 357 ms, but its kernels took 3.8 s when they were measured later, while other work ran."""
    cell = result(key(), 0.357, kernel_s=3.8, unexplained_s=0.357 - 3.8)
    assert breakdown_bars([cell], 8) == []
