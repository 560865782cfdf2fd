"""Verdicts of cells whose limits are known: labels of the rows of cases.csv, flags, signals and confidence.

A row has times in milliseconds at the ceilings, the label and its reason.
"""

import csv
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_facts import timed_step

from profiler.facts.overhead import Overhead
from profiler.facts.telemetry import ActiveShares
from profiler.judge.breakdown import TERMS, Demand, StepCeilings, break_down
from profiler.judge.regimes import LIMITS, Bound, Flag, Measurement, Regime, Verdict, judge_cell
from profiler.report.glossary import GLOSSARY
from profiler.report.plots.style import REGIME_COLOR
from profiler.stats import NoiseReport

W, P = 1e12, 100e12
CASES = list(csv.DictReader((Path(__file__).parent / "cases.csv").read_text().splitlines()))


def verdict_of(case: dict[str, str]) -> Verdict:
    """Judge a step with one operator per term: weights and cache at the memory ceiling, matmuls at the compute ceiling.

    `replayed` is the share of them that was replayed, which shows the losses and conversions of their kernels.
    """
    ms = {name: float(text) * 1e-3 for name, text in case.items() if name.endswith("_ms") and text}
    times = {name: ms[f"{name}_ms"] for name in ("weights", "kv", "compute")}
    whole_s = sum(times.values())
    clock_share = float(case["clock_share"])
    flops_per_s = P * clock_share  # the ceiling of a GPU at a part of its clock
    covered, lost_s, converted_s = float(case["replayed"]), ms["kernel_ms"], ms["dequantise_ms"]
    work = {
        "weights": (0.0, times["weights"] * W, 0.0),
        "kv": (0.0, 0.0, times["kv"] * W),
        "compute": (times["compute"] * P, 0.0, 0.0),
    }
    demands = []
    for name, (flops, weight_bytes, kv_bytes) in work.items():
        share = times[name] / whole_s
        for part, replayed in ((covered, True), (1 - covered, False)):
            alone_s = part * times[name] + share * (lost_s + converted_s) if replayed and covered else None
            converting_s = share * converted_s if replayed else 0.0
            sizes = (part * flops, part * weight_bytes, part * kv_bytes)
            demands.append(Demand(name, "mlp", *sizes, flops_per_s, alone_s, dequantise_s=converting_s))
    overlaps = case["overlaps"] == "1"
    owns = case["owns"] == "1"
    overhead = None if owns or not case["host_ms"] else Overhead(ms["host_ms"], 0.0)
    ceilings = StepCeilings(W, overhead, overlaps, fetch_s=ms["link_ms"])
    latency_s, width = ms["latency_ms"], float(case["half_width"])
    parts = break_down(latency_s, demands, ms["redundant_ms"], ceilings)
    cell = timed_step(
        times["compute"] * P,
        (times["weights"] + times["kv"]) * W or 1.0,
        latency_s * (1 - width),
        latency_s * (1 + width),
        noise=NoiseReport(case["noise"], ()),  # type: ignore[arg-type]
        clock_share=clock_share,
        activity=ActiveShares(float(case["sm_active"]) if case["sm_active"] else None, None),
    )
    split, graph_step_s, offloaded = parts.with_engine() if owns else parts, ms.get("graph_ms"), ms["link_ms"] > 0
    return judge_cell(Measurement(split, cell, flops_per_s, ceilings, graph_step_s=graph_step_s, offloaded=offloaded))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_labels_are_as_expected(case: dict[str, str]) -> None:
    """A row may also have a confidence and flags; `!` precedes a flag that the cell does not have."""
    found = verdict_of(case)
    assert found.regime == case["expected"], (case["reason"], [(e.signal, round(e.value, 2)) for e in found.evidence])
    if case["confidence"]:
        assert found.confidence == case["confidence"]
    for flag in case["flags"].split():
        assert (Flag(flag.removeprefix("!")) in found.flags) == (not flag.startswith("!")), flag


def measured(
    latency_s: float, flops: float, weight_bytes: float, ceilings: StepCeilings, flops_per_s: float = 1e14,
    replayed_s: float | None = None,
) -> Measurement:  # fmt: skip
    """A step of one operator with all the work, whose time is known to half a percent."""
    operator = Demand("all", "mlp", flops, weight_bytes, 0.0, flops_per_s, replayed_s)
    cell = timed_step(flops, weight_bytes, 0.995 * latency_s, 1.005 * latency_s)
    return Measurement(break_down(latency_s, [operator], 0.0, ceilings), cell, flops_per_s, ceilings)


def verdict(
    latency_s: float, flops: float, weight_bytes: float, *, overhead_s: float, bytes_per_s: float = 1e12,
    overlaps: bool = True, scale: float = 1.0,
) -> Verdict:  # fmt: skip
    """`scale` multiplies the times and divides the ceilings."""
    ceilings = StepCeilings(bytes_per_s / scale, Overhead(overhead_s * scale, 0.0), overlaps)
    return judge_cell(measured(latency_s * scale, flops, weight_bytes, ceilings, 1e14 / scale))


def test_a_step_that_overhead_fills_has_no_time_of_the_device_to_share() -> None:
    """Overhead measured at another moment may exceed the step: bytes then have no share of what is left of it."""
    found = verdict(0.8, 1e9, 6e8, bytes_per_s=1e10, overhead_s=0.84, overlaps=False)
    assert found.regime == "overhead-bound"
    assert not any("device's time" in item.signal for item in found.evidence)


def test_a_device_that_waited_for_its_host_at_the_start_of_a_prefill_works_on() -> None:
    """A quarter of 40 ms is idle and the rest is bytes: a faster device saves most, unless the host fills the step."""
    for host_s, idle_share, regime in (
        (20e-3, 0.5, "memory-bound"), (39e-3, 0.5, "mixed"), (40e-3, 0.0, "mixed"),
    ):  # fmt: skip
        ceilings = StepCeilings(
            1e12, Overhead(host_s, 0.0), overlaps=True, idle_share=idle_share, idle_most=2 * idle_share
        )
        step = measured(40e-3, 1e9, 3e10, ceilings, replayed_s=30e-3)
        assert step.terms.overhead_s == pytest.approx(10e-3)
        assert step.terms.unexplained_s == pytest.approx(0.0, abs=1e-9)
        assert judge_cell(step).regime == regime


@given(
    st.floats(1e-3, 1.0), st.floats(1e8, 1e14), st.floats(1e6, 1e11), st.floats(1e-4, 1e-2), st.floats(0.01, 100.0),
    st.booleans(),
)  # fmt: skip
def test_a_faster_machine_with_a_faster_clock_changes_nothing(
    latency_s: float, flops: float, bytes_: float, overhead_s: float, scale: float, overlaps: bool
) -> None:
    one, other = (
        verdict(latency_s, flops, bytes_, overhead_s=overhead_s, overlaps=overlaps, scale=by) for by in (1.0, scale)
    )
    assert one.regime == other.regime


def hosted_case(issue_s: float | None = None, **sides: str) -> Verdict:
    """Judge an H100 step of 10 ms whose host takes 9 ms and whose bytes take 2 ms."""
    step = measured(10e-3, 1e9, 6e9, StepCeilings(3.0e12, Overhead(9e-3, 0.0), overlaps=True), 680e12)
    ceilings = replace(step.ceilings, issue_s=issue_s)
    return judge_cell(replace(step, ceilings=ceilings, sides=sides))


def test_an_idle_host_contradicts_overhead() -> None:
    found = hosted_case(issue_s=2e-3)
    assert any(item.signal == "host issue time / step" for item in found.conflicts)
    assert hosted_case(issue_s=9.5e-3).conflicts == hosted_case().conflicts


def test_time_that_grows_with_the_prompt_as_flops_do_is_a_signal() -> None:
    found = hosted_case(prompt="compute")
    votes = [item.vote for item in found.evidence if item.signal == "doubling the prompt or context"]
    assert votes == ["compute-bound"]
    assert any("prompt" in item.signal for item in found.conflicts)  # it is bound by its host


RANK = {"low": 0, "medium": 1, "high": 2}


@given(st.floats(0.62, 1.0), st.sampled_from(["", "memory"]), st.booleans())
def test_more_evidence_never_lowers_confidence_unless_it_disagrees(share: float, side: str, graph: bool) -> None:
    """A flat doubling and a graph that saves nothing agree with a memory-bound step."""
    bare = measured(1e-2, 1e9, share * 1e10, StepCeilings(1e12, Overhead(1e-4, 0.0), overlaps=True))
    more = replace(bare, sides={"batch": side}, graph_step_s=0.99e-2 if graph else None)
    assert RANK[judge_cell(more).confidence] >= RANK[judge_cell(bare).confidence]
    against = replace(bare, graph_step_s=0.2e-2, sides={"batch": "compute"})
    assert RANK[judge_cell(against).confidence] <= RANK[judge_cell(bare).confidence]


@given(st.sampled_from(["memory-bound", "compute-bound"]), st.floats(0.65, 0.95), st.floats(0.01, 0.7), st.booleans())
def test_a_step_that_one_ceiling_explains_is_not_mixed(regime: str, share: float, other: float, overlaps: bool) -> None:
    """One ceiling needs 65 to 95 % of the step, the other at most 0.7 times as much, and the host 1 %."""
    by_memory, by_compute = (share, other * share) if regime == "memory-bound" else (other * share, share)
    found = verdict(1e-2, by_compute * 1e12, by_memory * 1e10, overhead_s=1e-4, overlaps=overlaps)
    assert found.regime == regime


def test_every_label_has_a_rule_that_explains_and_colours_it() -> None:
    assert set(get_args(Bound)) == set(LIMITS)
    assert set(get_args(Regime)) == set(REGIME_COLOR) <= set(GLOSSARY)
    assert {term for limit in LIMITS.values() for term in limit.terms} <= set(TERMS)
