"""The breakdown of a cell's time from its facts: work in and out of replayed calls, padding, hooked groups."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from made_facts import CELL, KEY, facts, pairs, terms

from profiler.facts.fact import MergedFacts
from profiler.facts.measurements import HookedStep, Replay, Replays
from profiler.facts.operators import REST, Cause, OperatorWork
from profiler.facts.overhead import Overhead
from profiler.facts.repetitions import Repetition
from profiler.facts.run_facts import Facts
from profiler.grid.cells import CellKey
from profiler.judge.demand import breakdown_of, cells_of_disturbed_overhead, cells_of_disturbed_parts
from profiler.judge.module_times import unexplained_by_group

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
        merged.add(Replays((KEY,), (Replay("op", (seconds,) * 3), Replay(f"only in {seconds}", (1.0,)))))
    assert merged.replays[KEY]["op"].whole.median_s == 1e-3
    assert len(merged.replays[KEY]) == 4, "an operator of only one replay is included"


@pytest.mark.parametrize(("kind", "plain_s", "disturbed_s"), [("cuda", 3.7e-3, 3.6e-3), ("cpu", 2.7e-3, 2.6e-3)])
def test_a_step_slowed_by_hooks_gives_no_times_by_group(kind: str, plain_s: float, disturbed_s: float) -> None:
    """An operator of 1 ms at the ceiling takes 3 of 4 ms with hooks: 2 ms are unexplained, unless hooks slowed the
    step.

    The limit is a tenth on a GPU, where hooks slow the host, and half on a CPU, whose speed may drift by a tenth.
    """
    linear = OperatorWork("up", "mlp", 1, "float16", 0.0, 1e9, 0.0, 0.0)
    hooked = HookedStep(KEY, {"mlp": (3e-3, 3e-3), "between modules": (1e-3, 1e-3)})
    made = replace(facts([linear], flops_per_s=1e15, bytes_per_s=1e12, kind=kind), hooked={KEY: hooked})
    assert unexplained_by_group(made, KEY, plain_s)["mlp"] == pytest.approx(2e-3)
    assert unexplained_by_group(made, KEY, disturbed_s) == {}
