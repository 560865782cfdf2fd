"""Cells whose label is known: rows of cases.csv with times in milliseconds at the ceilings, the label and its
reason."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from made_facts import timed_step

from profiler.facts.overhead import Overhead
from profiler.facts.telemetry import ActiveShares
from profiler.judge.breakdown import Demand, StepCeilings, break_down
from profiler.judge.regimes import Flag, Measurement, Verdict, judge_cell
from profiler.stats import NoiseReport

W, P = 1e12, 100e12
CASES = list(csv.DictReader((Path(__file__).parent / "cases.csv").read_text().splitlines()))


def verdict(case: dict[str, str]) -> Verdict:
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
    found = verdict(case)
    assert found.regime == case["expected"], (case["reason"], [(e.signal, round(e.value, 2)) for e in found.evidence])
    if case["confidence"]:
        assert found.confidence == case["confidence"]
    for flag in case["flags"].split():
        assert (Flag(flag.removeprefix("!")) in found.flags) == (not flag.startswith("!")), flag
