"""Dispatch from its samples, on quiet and on disturbed machines."""

from __future__ import annotations

import pytest

from profiler.facts.dispatch import Calls, Dispatch, DispatchSamples, bounded_by_steps, cold_dispatch, dispatch_of
from profiler.facts.visits import Visit
from profiler.grid.cells import Cell
from profiler.stats import LowerQuartile

WARM = LowerQuartile(6e-3, 3e-4)


def test_dispatch_is_that_of_a_step_with_cold_caches() -> None:
    found = cold_dispatch(WARM, LowerQuartile(10.5e-3, 4e-4), 2e-3)
    assert (found.step_s, found.in_kernels_s) == (10.5e-3, 2e-3)
    assert found.half_width_s == pytest.approx(5e-4)
    assert cold_dispatch(WARM, LowerQuartile(7e-3, 4e-4), 9e-3).in_kernels_s == 7e-3, "bare calls are a part of it"


@pytest.mark.parametrize("difference_s", [-4e-3, 0.0, 2e-3])
def test_a_busy_machine_cannot_make_dispatch_less_than_the_twins_own(difference_s: float) -> None:
    """Two times on a disturbed machine may differ by any amount, but cold caches never make a step faster."""
    found = cold_dispatch(WARM, LowerQuartile(difference_s, 9e-3), 2e-3)
    assert (found.step_s, found.in_kernels_s) == (6e-3, 2e-3)
    assert found.half_width_s > found.step_s


def test_dispatch_is_what_the_twin_takes_among_the_weights() -> None:
    """A step takes 12 ms, and another process doubles two thirds of the steps. Replays include 2 ms of calls."""
    samples = DispatchSamples(
        "eager", "decode", 1, alone_s=(6e-3,) * 8, among_s=(*[24e-3] * 10, *[12e-3] * 5),
        bare_s=(3e-3, 1.5e-3, 1.5e-3, 1.5e-3), cores=(Calls(30, (1e-6, 1e-3 / 60, 0.5e-3)),),
    )  # fmt: skip
    found = dispatch_of(samples)
    assert found.step_s == pytest.approx(12e-3)
    assert found.in_kernels_s == pytest.approx(2e-3)


def test_a_twin_that_steps_alone_pays_nothing_twice() -> None:
    """On CUDA no stream runs at the same time, and the previous kernel hides the launch of a replayed kernel."""
    found = dispatch_of(DispatchSamples("eager", "decode", 1, (6e-3,) * 8, waits=True))
    assert (found.step_s, found.in_kernels_s, found.waits) == (pytest.approx(6e-3), 0.0, True)
    assert found.half_width_s == pytest.approx(0.0, abs=1e-9)


def test_dispatch_is_at_most_the_fastest_whole_step() -> None:
    """Mistral-7B on an H100 whose host was shared: the twin was timed at 34.7 ms, and whole steps take 24.1 ms."""
    cells = {Cell(1, 64, 32): 24.3e-3, Cell(4, 64, 32): 24.1e-3, Cell(16, 512, 32): 28.2e-3}
    visits = {cell: [Visit(cell, 0, 30e-3, (step_s,) * 8, 1.0, (), None, 0.0)] for cell, step_s in cells.items()}
    measured = {
        ("eager", "decode", 1): Dispatch(34.7e-3, 0.0, half_width_s=19e-3),
        ("eager", "prefill", 1): Dispatch(22e-3, 0.0),
        ("graph", "decode", 1): Dispatch(34.7e-3, 0.0),
    }
    found = bounded_by_steps(measured, visits)
    slow, *others = found.values()
    assert (slow.step_s, slow.disturbed_s, slow.half_width_s) == (24.1e-3, 34.7e-3, pytest.approx(0.0, abs=1e-12))
    assert others == list(measured.values())[1:]
