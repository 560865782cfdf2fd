"""Parts of a step measured alone: what noise may do to them, and what it may not."""

from __future__ import annotations

import pytest

from profiler.clock import Timing
from profiler.isolation import cold_dispatch

WARM = Timing(6e-3, 3e-4)


def test_cold_dispatch_carries_its_calls_along() -> None:
    """10.5 ms among the weights, 6 ms alone: calls of 2 ms with warm caches take 3.5 with cold ones."""
    found = cold_dispatch(WARM, Timing(10.5e-3, 4e-4), 2e-3)
    assert found.step_s == 10.5e-3
    assert found.in_kernels_s == pytest.approx(3.5e-3)
    assert found.half_width_s == pytest.approx(5e-4)


@pytest.mark.parametrize("difference_s", [-4e-3, 0.0, 2e-3])
def test_a_busy_machine_cannot_make_dispatch_less_than_the_twins_own(difference_s: float) -> None:
    """Two times of a disturbed machine may differ by anything; a step with cold caches is no faster than a warm one."""
    found = cold_dispatch(WARM, Timing(difference_s, 9e-3), 2e-3)
    assert (found.step_s, found.in_kernels_s) == (6e-3, 2e-3)
    assert found.half_width_s > found.step_s
