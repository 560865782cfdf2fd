"""The time breakdown: terms that add up, for operators and ceilings made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from made_facts import terms

from profiler.facts.measurements import GenerateSteps
from profiler.facts.overhead import Overhead
from profiler.grid.cells import Cell
from profiler.judge.breakdown import TERMS, Demand, StepCeilings, break_down
from profiler.judge.engine_differences import parts_of

W = 1e12  # bytes/s
P = 100e12  # FLOP/s: the ridge is 100 FLOP/byte


def demand(flops: float, weight: float, kv: float = 0.0, replayed_s: float | None = None) -> Demand:
    return Demand("op", "mlp", flops, weight, kv, P, replayed_s)


@pytest.mark.parametrize(("overhead_model_s", "overhead_s"), [(22.7e-3, 18.1e-3), (7e-3, 0.0)])
def test_the_gpu_idles_while_a_slower_host_issues_the_step(overhead_model_s: float, overhead_s: float) -> None:
    """A Mistral-7B step on an H100 took 26.1 ms, of which kernels took 8.0 ms. The host issued it in 27.8 ms.

    As a CUDA graph it took 17.4 ms less. A host that is faster than the kernels fills its queue of launches, and then
    takes as long as they do.
    """
    ceilings = StepCeilings(2.94e12, Overhead(overhead_model_s, 0.0), overlaps=True, issue_s=27.8e-3)
    parts = break_down(26.1e-3, [demand(0.0, 14.2e9, replayed_s=8.0e-3)], 0.0, ceilings)
    assert parts.overhead_s == pytest.approx(overhead_s)
    assert parts.unexplained_s == pytest.approx(18.1e-3 - overhead_s)


def test_offloaded_weights_pay_for_the_link() -> None:
    """8 GB over a link of 16 GB/s take half a second, in addition to the time of the device's memory."""
    ceilings = StepCeilings(W, None, overlaps=True, fetch_s=8e9 / 16e9)
    found = break_down(0.6, [demand(0, 8e9)], 0.0, ceilings)
    assert (found.link_s, found.weights_s) == (pytest.approx(0.5), pytest.approx(8e-3))
    assert found.attained == pytest.approx(0.508 / 0.6)
    assert terms(found) == pytest.approx(0.6)


def test_half_widths_of_terms() -> None:
    """Errors of one ceiling scale its terms; independent errors add in quadrature (3 and 4 give 5)."""
    ceilings = StepCeilings(W, Overhead(4e-3, 0.0, half_width_s=0.4e-3), overlaps=False, memory_half_width=0.01)
    replayed = Demand("op", "mlp", 1e9, 2e9, 1e9, P, replayed_s=5e-3, replayed_half_width_s=0.3e-3)
    widths_s = break_down(12e-3, [replayed], 0.0, ceilings).half_widths_s
    assert set(widths_s) == set(TERMS)
    assert widths_s["weights_s"] == pytest.approx(0.02e-3)
    assert widths_s["kv_s"] == pytest.approx(0.01e-3)
    assert widths_s["kernel_s"] == pytest.approx(math.hypot(0.3e-3, 0.03e-3))
    # An error of the ceiling only moves time between weights and kernel, so it does not change the residual.
    assert widths_s["unexplained_s"] == pytest.approx(0.5e-3)
    ceilings = StepCeilings(W, None, overlaps=False, memory_half_width=0.02)
    widths_s = break_down(12e-3, [demand(1e9, 2e9)], 0.0, ceilings, 0.03e-3).half_widths_s
    assert widths_s["unexplained_s"] == pytest.approx(0.05e-3)


def test_parts_of_both_loops_are_differences() -> None:
    """Of 10 ms, 2 are reads, 1 stopping and 3 inputs. The forward takes 20 ms, not 18, and its cache 5 ms, not 4."""
    within = {"read": 2e-3, "stopping": 1e-3, "processors": 0.0, "inputs": 3e-3, "cache": 5e-3, "forward": 20e-3}
    own = {"cache": 4e-3, "forward": 18e-3, "read": 0.0, "stopping": 0.0, "processors": 0.0, "inputs": 0.0}
    in_turns = {name: (value, value, 1.0) for name, value in within.items()}
    once = {name: (value,) for name, value in own.items()}
    steps = GenerateSteps(Cell(1, 8, 4, engine="generate"), "5.0", in_turns, once, (2e-3,), 1.0)
    expected = {"read": 2e-3, "stopping": 1e-3, "processors": 0.0, "inputs": 3e-3, "cache": 1e-3, "forward": 1e-3}
    assert parts_of(steps, 10e-3) == pytest.approx({**expected, "rest": 2e-3})


def test_the_overhead_of_generate_is_a_term_with_an_interval() -> None:
    """12 ms measured, 8 ms for the weights, 3 ms overhead: 1 ms is left. Errors of 3 and 4 give 5."""
    ceilings = StepCeilings(1e12, None, overlaps=False)
    before = break_down(12e-3, [Demand("op", "mlp", 0.0, 8e9, 0.0, 1e15)], 0.0, ceilings, 0.4e-3)
    found = before.with_generate(3e-3, 0.3e-3)
    assert found.generate_s == 3e-3
    assert found.unexplained_s == pytest.approx(1e-3)
    assert terms(found) == pytest.approx(12e-3)
    assert found.half_widths_s["generate_s"] == 0.3e-3
    assert found.half_widths_s["unexplained_s"] == pytest.approx(math.hypot(0.3e-3, 0.4e-3))


@pytest.mark.parametrize(("latency_s", "engine_s", "unexplained_s"), [(15e-3, 4e-3, 0.0), (9e-3, 0.0, -2e-3)])
def test_time_beyond_the_ceilings_is_the_engines(latency_s: float, engine_s: float, unexplained_s: float) -> None:
    """1 GB of weights and 0.1 GB of cache at 100 GB/s need 11 ms. An engine takes the rest, but no time below zero."""
    ceilings = StepCeilings(100e9, None, overlaps=False)
    found = break_down(latency_s, [demand(1e6, 1e9, 0.1e9)], 0.0, ceilings, 0.2e-3).with_engine()
    assert (found.engine_s, found.unexplained_s) == (pytest.approx(engine_s), pytest.approx(unexplained_s))
    assert terms(found) == pytest.approx(latency_s)
    assert found.half_widths_s["engine_s"] >= 0.2e-3


def test_a_breakdown_adds_up_if_little_is_unexplained_or_negative() -> None:
    """1 of 10 ms unexplained is little; 6 of 15 ms are not, nor is a rest of -5 ms after 12 ms of overhead."""
    ceilings = StepCeilings(100e9, Overhead(6e-3, 0.0), overlaps=False)
    demands = [Demand("op", "mlp", 1e6, 0.3e9, 0.0, 1e12)]
    assert break_down(10e-3, demands, 0.0, ceilings).adds_up
    assert not break_down(15e-3, demands, 0.0, ceilings).adds_up
    assert not break_down(10e-3, demands, 0.0, replace(ceilings, overhead=Overhead(12e-3, 0.0))).adds_up
