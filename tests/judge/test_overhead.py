"""Overhead and joules per token from their samples, on quiet and on disturbed machines."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from profiler.facts.overhead import Calls, OverheadSamples, overhead_of
from profiler.facts.repetitions import Repetition
from profiler.grid.cells import Cell
from profiler.judge.cells import joules_a_token

SAMPLES = OverheadSamples("eager", "decode", 1, alone_s=(6.0,) * 8, bare_s=(2.0,) * 4)


@pytest.mark.parametrize(
    ("among_s", "calls_s", "found"), [(10, 2, (10, 2)), (7, 9, (7, 7)), (-4, 2, (6, 2)), (0, 2, (6, 2))]
)
def test_overhead_is_that_of_a_step_with_cold_caches(among_s: float, calls_s: float, found: tuple[int, int]) -> None:
    """Calls are a part of it. Two times on a busy machine may differ by any amount, but cold caches help no step."""
    overhead = overhead_of(replace(SAMPLES, among_s=(among_s,) * 8, bare_s=(calls_s,) * 4))
    assert (overhead.step_s, overhead.in_kernels_s) == found


def test_half_widths_of_both_steps_add_in_quadrature() -> None:
    """The quartiles of nine samples 1 s apart are 5 s apart: 1.57 x 5 / 3 = 2.617 s; twice as far, twice that."""
    found = overhead_of(replace(SAMPLES, alone_s=tuple(range(9)), among_s=tuple(range(0, 18, 2))))
    assert found.half_width_s == pytest.approx(math.hypot(2.617, 5.233), rel=1e-3)


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


WATTS = 400.0
CELL = Cell(1, 64, 9)


def repetitions(wall_s: float, count: int, seed: int = 0) -> list[Repetition]:
    """Return repetitions at 400 W that start at random between the ticks of a counter with ten updates per second."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        start_s = draw.uniform(0, 100)
        joules = WATTS * (int((start_s + wall_s) * 10) - int(start_s * 10)) / 10
        rows.append(Repetition(CELL, number, None, (wall_s / 9,) * 8, wall_s, (), None, start_s, energy_j=joules))
    return rows


def test_many_short_repetitions_give_the_right_energy() -> None:
    """Each of 25 repetitions of 0.13 s gets 1 or 2 ticks of 0.1 s, so no median over repetitions would be right."""
    for seed in range(20):
        found = joules_a_token(repetitions(0.13, 25, seed))
        assert found == pytest.approx(WATTS * 0.13 / 9, rel=0.25)


def test_energy_of_too_few_ticks_is_none() -> None:
    assert joules_a_token(repetitions(0.05, 4)) is None
    assert joules_a_token([Repetition(CELL, 0, None, (1.0,), 9.0, (), None, 0.0)]) is None


def test_a_repetition_that_ended_early_gave_fewer_tokens() -> None:
    """400 W for 2 s a token: 800 J each, whether a repetition made all nine tokens or the first three."""
    metered = (Repetition(CELL, 0, None, (2.0,) * steps, 2.0 * (steps + 1), (), None, 0.0) for steps in (8, 2))
    found = joules_a_token([replace(repetition, energy_j=WATTS * repetition.wall_s) for repetition in metered])
    assert found == 800
