"""Cells whose label is known: rows of cases.csv with times in milliseconds at the roofs, the label and its reason."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from profiler.facts.dispatch import Dispatch
from profiler.judge.breakdown import Demand, StepRoofs, break_down, with_engine
from profiler.judge.regimes import Flag, Measurement, Verdict, judge_cell

W, P = 1e12, 100e12
CASES = list(csv.DictReader((Path(__file__).parent / "cases.csv").read_text().splitlines()))


def verdict(case: dict[str, str]) -> Verdict:
    """Judge a step with one operator per term: weights and cache at the memory roof, products at the compute roof.

    `replayed` is the share of them that was replayed, which shows the losses and conversions of their kernels.
    """
    ms = {name: float(text) * 1e-3 for name, text in case.items() if name.endswith("_ms") and text}
    times = {name: ms[f"{name}_ms"] for name in ("weights", "kv", "compute")}
    whole_s = sum(times.values())
    clock_share = float(case["clock_share"])
    flops_per_s = P * clock_share  # the roof of a GPU at a part of its clock
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
    roofs = StepRoofs(W, None if owns else Dispatch(ms["host_ms"], 0.0), overlaps, fetch_s=ms["link_ms"])
    latency_s, width = ms["latency_ms"], float(case["half_width"])
    parts = break_down(latency_s, demands, ms["avoidable_ms"], roofs)
    return judge_cell(
        Measurement(
            split=with_engine(parts) if owns else parts,
            model_flops=times["compute"] * P,
            model_bytes=(times["weights"] + times["kv"]) * W or 1.0,
            compute_flops_per_s=flops_per_s,
            roofs=roofs,
            latency_low_s=latency_s * (1 - width),
            latency_high_s=latency_s * (1 + width),
            noise=case["noise"],
            graph_step_s=ms.get("graph_ms"),
            clock_share=clock_share,
            sm_active=float(case["sm_active"]) if case["sm_active"] else None,
            offloaded=ms["link_ms"] > 0,
        )
    )


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_labels_are_as_expected(case: dict[str, str]) -> None:
    found = verdict(case)
    assert found.regime == case["expected"], (case["reason"], [(e.signal, round(e.value, 2)) for e in found.evidence])


def named(name: str) -> Verdict:
    return verdict(next(case for case in CASES if case["name"] == name))


def test_a_step_clearly_above_its_roof_has_low_confidence() -> None:
    near, far = named("at 1.01 of a roof"), named("at 1.70 of a roof")
    assert Flag.ABOVE_ROOF not in near.flags
    assert (Flag.ABOVE_ROOF in far.flags, far.confidence) == (True, "low")


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("A100 decode batch 64 KV", Flag.KV_BOUND),
        ("Llama-2-7B batch 256 H100-64GB vLLM", Flag.KV_BOUND),
        ("H100 prefill at half clock", Flag.THROTTLED),
        ("nf4 dense copy L4 batch 8", Flag.INEFFICIENT_KERNELS),
        ("CPU with a copied cache", Flag.WASTEFUL_PATH),
    ],
)
def test_what_limits_a_step_is_flagged(name: str, flag: Flag) -> None:
    assert flag in named(name).flags


@pytest.mark.parametrize(
    ("name", "confidence"),
    [
        *((name, "high") for name in ("Llama-2-7B batch 1 A100 gpt-fast", "H100 decode batch 1 graph")),
        ("a product at 85 % of its roof", "high"),
        ("slow wall without replays", "low"),
        # A label that holds over the whole interval is medium at most, however wide the interval is.
        ("interval of 12 % that clears the threshold", "medium"),
    ],
)
def test_a_clear_case_has_high_confidence_and_noise_lowers_it(name: str, confidence: str) -> None:
    assert named(name).confidence == confidence
