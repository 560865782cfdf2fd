"""Overhead from its samples, on quiet and on disturbed machines."""

from __future__ import annotations

import pytest

from profiler.facts.overhead import Calls, OverheadSamples, cold_overhead, overhead_of
from profiler.stats import LowerQuartile

WARM = LowerQuartile(6e-3, 3e-4)


def test_overhead_is_that_of_a_step_with_cold_caches() -> None:
    found = cold_overhead(WARM, LowerQuartile(10.5e-3, 4e-4), 2e-3)
    assert (found.step_s, found.in_kernels_s) == (10.5e-3, 2e-3)
    assert found.half_width_s == pytest.approx(5e-4)
    assert cold_overhead(WARM, LowerQuartile(7e-3, 4e-4), 9e-3).in_kernels_s == 7e-3, "bare calls are a part of it"


@pytest.mark.parametrize("difference_s", [-4e-3, 0.0, 2e-3])
def test_a_busy_machine_cannot_make_overhead_less_than_the_overhead_models_own(difference_s: float) -> None:
    """Two times on a disturbed machine may differ by any amount, but cold caches never make a step faster."""
    found = cold_overhead(WARM, LowerQuartile(difference_s, 9e-3), 2e-3)
    assert (found.step_s, found.in_kernels_s) == (6e-3, 2e-3)
    assert found.half_width_s > found.step_s


def test_overhead_is_what_the_overhead_model_takes_among_the_weights() -> None:
    """A step takes 12 ms, and another process doubles two thirds of the steps. Replays include 2 ms of calls."""
    samples = OverheadSamples(
        "eager", "decode", 1, alone_s=(6e-3,) * 8, among_s=(*[24e-3] * 10, *[12e-3] * 5),
        bare_s=(3e-3, 1.5e-3, 1.5e-3, 1.5e-3), cores=(Calls(30, (1e-6, 1e-3 / 60, 0.5e-3)),),
    )  # fmt: skip
    found = overhead_of(samples)
    assert found.step_s == pytest.approx(12e-3)
    assert found.in_kernels_s == pytest.approx(2e-3)


def test_an_overhead_model_that_steps_alone_pays_nothing_twice() -> None:
    """On CUDA no stream runs at the same time, and the previous kernel hides the launch of a replayed kernel."""
    found = overhead_of(OverheadSamples("eager", "decode", 1, (6e-3,) * 8, waits=True))
    assert (found.step_s, found.in_kernels_s, found.waits) == (pytest.approx(6e-3), 0.0, True)
    assert found.half_width_s == pytest.approx(0.0, abs=1e-9)
