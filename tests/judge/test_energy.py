"""Joules per token from a coarse energy counter: right over many repetitions, else None."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from profiler.facts.repetitions import Repetition
from profiler.grid.cells import Cell
from profiler.judge.cells import joules_a_token

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
