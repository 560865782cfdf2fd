"""Parts of a step measured alone: what noise may do to them, and what it may not."""

from __future__ import annotations

import pytest

from profiler.diagnosis.dispatch import cold_dispatch, dispatch_of
from profiler.diagnosis.facts import DispatchSamples
from profiler.machine.clock import Timing

WARM = Timing(6e-3, 3e-4)


def test_dispatch_is_that_of_a_step_with_cold_caches() -> None:
    found = cold_dispatch(WARM, Timing(10.5e-3, 4e-4), 2e-3)
    assert (found.step_s, found.in_kernels_s) == (10.5e-3, 2e-3)
    assert found.half_width_s == pytest.approx(5e-4)


def test_bare_calls_are_a_part_of_the_step() -> None:
    assert cold_dispatch(WARM, Timing(7e-3, 4e-4), 9e-3).in_kernels_s == 7e-3


@pytest.mark.parametrize("difference_s", [-4e-3, 0.0, 2e-3])
def test_a_busy_machine_cannot_make_dispatch_less_than_the_twins_own(difference_s: float) -> None:
    """Two times of a disturbed machine may differ by anything; a step with cold caches is no faster than a warm one."""
    found = cold_dispatch(WARM, Timing(difference_s, 9e-3), 2e-3)
    assert (found.step_s, found.in_kernels_s) == (6e-3, 2e-3)
    assert found.half_width_s > found.step_s


def test_a_slow_minute_is_not_taken_for_dispatch() -> None:
    """12 ms beside linears of 38; a neighbour makes both twice as slow from the first turn's steps on for a while."""
    samples = DispatchSamples(
        engine="eager",
        phase="decode",
        batch_size=1,
        alone_s=(6e-3,) * 8,
        among_s=(*[100e-3] * 6, *[50e-3] * 9),
        linears_s=(76e-3, 38e-3, 38e-3, 38e-3, 38e-3),
        with_bare_s=(80e-3, 40e-3, 40e-3, 40e-3, 40e-3),
    )
    found = dispatch_of(samples)
    assert found.step_s == pytest.approx(14e-3), "12 ms, and the 2 ms of the linears' own calls"
    assert found.in_kernels_s == pytest.approx(2e-3)


def test_linears_that_were_seen_once_tell_no_dispatch() -> None:
    """A 7B model in 4 bits, as measured: 0.8 s of linears, seen once, beside steps of 1.07 s in a bad minute. Its steps
    took 0.35 s, and the twin's own 25 ms."""
    samples = DispatchSamples(
        engine="eager",
        phase="decode",
        batch_size=4,
        alone_s=(25e-3,) * 8,
        among_s=(1.074, 1.038, 1.120),
        linears_s=(0.795,),
        with_bare_s=(0.879,),
    )
    found = dispatch_of(samples)
    assert found.step_s == pytest.approx(25e-3)
    assert found.in_kernels_s <= found.step_s
