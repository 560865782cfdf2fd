"""The generate tax by arithmetic: parts add up to it, and it is taken from what nothing explains."""

from __future__ import annotations

import math

import pytest

from profiler.facts.measurements import GenerateSteps
from profiler.grid.cells import Cell
from profiler.judge.breakdown import TERMS, Demand, StepRoofs, break_down, with_generate
from profiler.judge.engine_differences import parts_of


def test_what_both_loops_have_counts_by_its_difference() -> None:
    """Of 10 ms: 2 read, 1 stopping, 3 inputs; the forward takes 20 against 18, of which the cache takes 5 against 4."""
    within = {"read": 2e-3, "stopping": 1e-3, "processors": 0.0, "inputs": 3e-3, "cache": 5e-3, "forward": 20e-3}
    own = {"cache": 4e-3, "forward": 18e-3, "read": 0.0, "stopping": 0.0, "processors": 0.0, "inputs": 0.0}
    steps = GenerateSteps(
        Cell(1, 8, 4, engine="generate"),
        "5.0",
        {name: (value, value, 1.0) for name, value in within.items()},
        {name: (value,) for name, value in own.items()},
        (2e-3,),
        1.0,
    )
    wanted = {"read": 2e-3, "stopping": 1e-3, "processors": 0.0, "inputs": 3e-3, "cache": 1e-3, "forward": 1e-3}
    assert parts_of(steps, 10e-3) == pytest.approx({**wanted, "rest": 2e-3})


def test_the_tax_is_a_term_with_an_interval() -> None:
    """12 ms measured, 8 ms for the weights, 3 ms tax: 1 ms is left; errors of 3 and 4 are 5."""
    roofs = StepRoofs(1e12, None, overlaps=False)
    before = break_down(12e-3, [Demand("op", "mlp", 0.0, 8e9, 0.0, 1e15)], 0.0, roofs, 0.4e-3)
    found = with_generate(before, 3e-3, 0.3e-3)
    assert found.generate_s == 3e-3
    assert found.unexplained_s == pytest.approx(1e-3)
    assert sum(getattr(found, term) for term in TERMS) == pytest.approx(12e-3)
    assert found.half_widths_s["generate_s"] == 0.3e-3
    assert found.half_widths_s["unexplained_s"] == pytest.approx(math.hypot(0.3e-3, 0.4e-3))
