"""The split of an engine that owns its model, and where its difference to another lies, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from profiler.facts.dispatch import Dispatch
from profiler.judge.answer import where_it_lies
from profiler.judge.breakdown import TERMS, Demand, StepRoofs, adds_up, break_down, with_engine
from profiler.judge.cells import EngineDifference


def test_what_is_not_known_from_outside_is_the_engines() -> None:
    """1 GB of weights and 0.1 GB of cache at 100 GB/s need 11 ms of 15: four are the engine's, and none is left."""
    roofs = StepRoofs(100e9, None, overlaps=False)
    parts = break_down(15e-3, [Demand("op", "mlp", 1e6, 1e9, 0.1e9, 1e12)], 0.0, roofs, 0.2e-3)
    found = with_engine(parts)
    assert found.engine_s == pytest.approx(4e-3)
    assert found.unexplained_s == 0
    assert sum(getattr(found, term) for term in TERMS) == pytest.approx(15e-3)
    assert found.half_widths_s["engine_s"] >= 0.2e-3


def test_a_step_above_its_roof_has_no_engine_term_below_zero() -> None:
    parts = break_down(8e-3, [Demand("op", "mlp", 1e6, 1e9, 0.0, 1e12)], 0.0, StepRoofs(100e9, None, overlaps=False))
    found = with_engine(parts)
    assert found.engine_s == 0
    assert found.unexplained_s == pytest.approx(-2e-3)


def test_a_split_that_does_not_add_up_tells_not_where_time_goes() -> None:
    """Dispatch of 12 ms in a step of 10 leaves less than nothing to explain, 3 ms of kernels explain it; 5 unexplained
    are too many, 1 is not."""
    roofs = StepRoofs(100e9, Dispatch(6e-3, 0.0), overlaps=False)
    demands = [Demand("op", "mlp", 1e6, 0.3e9, 0.0, 1e12)]
    assert adds_up(break_down(10e-3, demands, 0.0, roofs))
    assert not adds_up(break_down(15e-3, demands, 0.0, roofs))
    assert not adds_up(break_down(10e-3, demands, 0.0, replace(roofs, dispatch=Dispatch(12e-3, 0.0))))


def test_where_a_difference_lies_is_told_the_largest_first() -> None:
    found = EngineDifference(
        "decode", 1, 64, 80, 32, "vllm", against="eager", saves_s=5.1e-3, low_s=5e-3, high_s=5.2e-3, how="CUDA graphs",
        terms={"dispatch_s": -4.4e-3, "avoidable_s": -0.9e-3, "engine_s": 0.3e-3, "kv_s": -0.1e-3},
        causes={"cache copies": -0.9e-3},
    )  # fmt: skip
    assert where_it_lies(found) == [
        "dispatch (CUDA graphs) -4.40 ms",
        "cache copies -900 us",
        "the engine's own (scheduler, sampler, launches, its kernels' losses) +300 us",
    ]
