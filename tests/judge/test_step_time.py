"""The time breakdown: terms that add up, by hand and from a cell's facts: replayed calls, padding, hooked groups.

Overhead and joules per token follow from their samples, on quiet and on disturbed machines.
"""

import csv
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from made_facts import CELL, KEY, facts, pairs, terms

from profiler.facts.fact import MergedFacts
from profiler.facts.measurements import GenerateSteps, HookedStep, Replay, Replays
from profiler.facts.operators import REST, Cause, OperatorWork
from profiler.facts.overhead import Calls, Overhead, OverheadSamples, overhead_of
from profiler.facts.repetitions import Repetition
from profiler.facts.run_facts import Facts
from profiler.grid.cells import Cell, CellKey
from profiler.judge.breakdown import TERMS, Demand, StepCeilings, break_down
from profiler.judge.cells import joules_a_token
from profiler.judge.demand import breakdown_of, cells_of_disturbed_overhead, cells_of_disturbed_parts
from profiler.judge.engine_differences import parts_of
from profiler.judge.module_times import unexplained_by_group

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


CASES = list(csv.DictReader(Path(__file__).with_name("breakdowns.csv").read_text().splitlines()))
GROUPS = {"core": "attention", "norm": "norm"}
CARD = {"flops_per_s": 1e14, "bytes_per_s": 1e12}


def causes(text: str, unit: float = 1.0) -> dict[Cause, float]:
    return {Cause[name]: unit * value for name, value in pairs(text).items()}


def facts_of(case: dict[str, str]) -> Facts:
    """Facts of a step of these operators: a name, FLOPs, bytes of weights, cache and activations."""
    given = CARD | pairs(case["settings"])
    host, calls, converting_calls, converting = (
        given.pop(f"{name}_ms", 0.0) / 1e3 for name in ("host", "calls", "converting_calls", "converting")
    )
    waits, without_faults = (bool(given.pop(name, 0)) for name in ("waits", "without_faults"))
    page_fault_s = given.pop("page_fault_us", 0.0) * 1e-6
    redundant = causes(case["redundant_flops"]), causes(case["redundant_bytes"])
    operators = [
        OperatorWork(name, GROUPS.get(name, "mlp"), 1, "float16", *map(float, amounts), *redundant)
        for name, *amounts in map(str.split, case["operators"].split("|"))
    ]
    names = {"REST": REST}
    replays = [
        Replay(names.get(name, name), (ms / 1e3,) * 9, (converting,) * 9 if converting else (), without_faults)
        for name, ms in pairs(case["replays_ms"]).items()
    ]
    made = facts(operators, {replay.operator: replay for replay in replays}, **given)
    overhead = {("eager", "decode", 1): Overhead(host, calls, converting_calls, waits=waits)} if host else {}
    return replace(made, overhead=overhead, ceilings=replace(made.ceilings, page_fault_s=page_fault_s))


@pytest.mark.parametrize("case", CASES, ids=[case["reason"] for case in CASES])
def test_a_step_has_the_parts_that_arithmetic_gives(case: dict[str, str]) -> None:
    """At 100 TFLOP/s and 1 TB/s, unless the row has other ceilings; all parts add up to the step."""
    latency_s, close = float(case["latency_ms"]) / 1e3, partial(pytest.approx, rel=1e-6, abs=1e-9)
    parts, by_cause = breakdown_of(facts_of(case), KEY, latency_s, faults=float(case["faults"] or 0))
    expected = {f"{part}_s": ms / 1e3 for part, ms in pairs(case["parts_ms"]).items()}
    assert {part: getattr(parts, part) for part in expected} == close(expected)
    assert terms(parts) == close(latency_s)
    expected_by = causes(case["causes_ms"], 1e-3)
    assert {cause: by_cause[cause] for cause in expected_by} == close(expected_by)


@pytest.mark.parametrize(("replayed_s", "is_held_up"), [(0.9e-3, False), (1.05e-3, False), (1.2e-3, True)])
def test_a_part_cannot_take_longer_than_the_whole(replayed_s: float, is_held_up: bool) -> None:
    """A step of 1 ms whose only operator takes `replayed_s` in isolation."""
    operator = OperatorWork("op", "mlp", 1, "float16", 10, 1, 0, 0, {}, {})
    made = facts([operator], {"op": Replay("op", (replayed_s,) * 9)}, flops_per_s=1e6, bytes_per_s=1e9)
    repetition = Repetition(CELL, 0, 1.0, (1e-3,) * 7, 1.0, (), None, 0.0)
    timed = replace(made, repetitions={CELL: [repetition]}, operators={KEY: [operator], CellKey("prefill", CELL): []})
    assert cells_of_disturbed_parts(timed) == ([CELL] if is_held_up else [])
    assert cells_of_disturbed_overhead(timed) == []


def test_the_fastest_of_several_replays_is_used() -> None:
    merged = MergedFacts()
    for seconds in (2e-3, 1e-3, 3e-3):
        Replays((KEY,), (Replay("op", (seconds,) * 3), Replay(f"only in {seconds}", (1.0,)))).merge_into(merged)
    assert merged.replays[KEY]["op"].whole.median_s == 1e-3
    assert len(merged.replays[KEY]) == 4, "an operator of only one replay is included"


@pytest.mark.parametrize(("kind", "plain_s", "disturbed_s"), [("cuda", 3.7e-3, 3.6e-3), ("cpu", 2.7e-3, 2.6e-3)])
def test_a_step_slowed_by_hooks_gives_no_times_by_group(kind: str, plain_s: float, disturbed_s: float) -> None:
    """An operator of 1 ms at the ceiling takes 3 ms with hooks: 2 ms are unexplained, unless hooks slowed the step.

    The limit is a tenth on a GPU, where hooks slow the host, and half on a CPU, whose speed may drift by a tenth.
    """
    linear = OperatorWork("up", "mlp", 1, "float16", 0.0, 1e9, 0.0, 0.0)
    hooked = HookedStep(KEY, {"mlp": (3e-3, 3e-3), "between modules": (1e-3, 1e-3)})
    made = replace(facts([linear], flops_per_s=1e15, bytes_per_s=1e12, kind=kind), hooked={KEY: hooked})
    assert unexplained_by_group(made, KEY, plain_s)["mlp"] == pytest.approx(2e-3)
    assert unexplained_by_group(made, KEY, disturbed_s) == {}


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
METERED = Cell(1, 64, 9)


def repetitions(wall_s: float, count: int, seed: int = 0) -> list[Repetition]:
    """Return repetitions at 400 W that start at random between the ticks of a counter with ten updates per second."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        start_s = draw.uniform(0, 100)
        joules = WATTS * (int((start_s + wall_s) * 10) - int(start_s * 10)) / 10
        rows.append(Repetition(METERED, number, None, (wall_s / 9,) * 8, wall_s, (), None, start_s, energy_j=joules))
    return rows


def test_many_short_repetitions_give_the_right_energy() -> None:
    """Each of 25 repetitions of 0.13 s gets 1 or 2 ticks of 0.1 s, so no median over repetitions would be right."""
    for seed in range(20):
        found = joules_a_token(repetitions(0.13, 25, seed))
        assert found == pytest.approx(WATTS * 0.13 / 9, rel=0.25)


def test_energy_of_too_few_ticks_is_none() -> None:
    assert joules_a_token(repetitions(0.05, 4)) is None
    assert joules_a_token([Repetition(METERED, 0, None, (1.0,), 9.0, (), None, 0.0)]) is None


def test_a_repetition_that_ended_early_gave_fewer_tokens() -> None:
    """400 W for 2 s a token: 800 J each, whether a repetition made all nine tokens or the first three."""
    metered = (Repetition(METERED, 0, None, (2.0,) * steps, 2.0 * (steps + 1), (), None, 0.0) for steps in (8, 2))
    found = joules_a_token([replace(repetition, energy_j=WATTS * repetition.wall_s) for repetition in metered])
    assert found == 800
