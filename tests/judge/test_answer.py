"""The answer about cells whose limits are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from machines import roof
from made_facts import facts

from profiler.facts.measurements import GRAPHED
from profiler.facts.operators import COLLECTIVE, Cause, OperatorWork
from profiler.facts.roofs import CurvePoint
from profiler.facts.run_facts import Facts
from profiler.facts.visits import Visit
from profiler.grid.cells import Cell, CellKey, Grid, Phase
from profiler.judge import answer as advice
from profiler.judge.breakdown import TimeBreakdown
from profiler.judge.cells import EngineDifference, JudgedCell, TrialResult
from profiler.judge.engine_differences import where_it_lies
from profiler.judge.judge_run import judge_run
from profiler.judge.levers import Setting, levers
from profiler.judge.regimes import Flag, Regime, Verdict

CELL = Cell(batch_size=1, prompt_len=0, new_tokens=8, context_len=64)
KEY = CellKey("decode", CELL)
SETTING = Setting(1e12, 100e12, weight_bits=4.5, can_graph=True)


def breakdown(latency_s: float, weights_s: float, **terms: float) -> TimeBreakdown:
    """Return a breakdown at the roof of its weights; terms that are not given are 0."""
    zeros = dict.fromkeys(("kv_s", "compute_s", "dequantise_s", "kernel_s", "avoidable_s", "dispatch_s"), 0.0)
    return TimeBreakdown(
        latency_s=latency_s, device_s=weights_s, floor_s=weights_s, weights_s=weights_s,
        **{**zeros, "unexplained_s": 0.0, **terms},
    )  # fmt: skip


def of_parts(parts: TimeBreakdown, regime: Regime, key: CellKey = KEY, **more: Any) -> JudgedCell:
    """Return a judged step with these parts, under roofs of 1 TB/s and 100 TFLOP/s."""
    return JudgedCell(key, 100.0, 1e9, 1e12, 1e12, 100e12, parts, Verdict(regime, "high", (), ()), **more)


def answer(cells: Sequence[JudgedCell], setting: Setting, *more: Any) -> list[str]:
    """Return the answer about cells with their levers."""
    return advice.answer([replace(cell, levers=tuple(levers(cell, setting))) for cell in cells], setting, *more)


def measured(of: Facts, **seconds: float) -> Facts:
    """Return the facts with four visits of each engine, at its seconds per step."""
    cells = {name: replace(CELL, engine=name) for name in seconds}
    return replace(
        of,
        operators={replace(KEY, cell=cell): work for cell in cells.values() for work in of.operators.values()},
        grid=Grid((), (1,), 8, context_lens=(64,), engines=tuple(seconds)),
        predicted_peak_bytes=dict.fromkeys(cells.values(), 1),
        visits={
            cell: [Visit(cell, 0, None, (seconds[name],) * 8, 2.0, (), 1, 0.0)] * 4 for name, cell in cells.items()
        },
    )


@pytest.mark.parametrize(("attained", "unexplained", "words"), [
    (0.92, 0.02, "Nothing to gain but a faster device: this step is at 92 % of its roofline"),
    (0.30, 0.66, "No change is known that saves 5 %: this step is at 30 % of its roofline, and 66 % of it is unexpl"),
    (0.50, 0.02, "No change is known that saves 5 %: this step is at 50 % of its roofline."),
])  # fmt: skip
def test_only_a_step_near_its_roof_has_nothing_to_gain(attained: float, unexplained: float, words: str) -> None:
    parts = breakdown(1e-2, attained * 1e-2, unexplained_s=unexplained * 1e-2)
    cell = of_parts(parts, "memory-bound" if attained > 0.6 else "inconclusive")
    [*_, change] = answer([replace(cell, bytes_per_s=attained * 1e12)], SETTING)
    assert change.startswith(words)


def test_a_share_is_of_the_roof_that_judged() -> None:
    """A step reads 1 GB at 2 TB/s; caches reach 2.5 TB/s and memory 1 TB/s, so the share is 80 %, not 200 %."""
    read = OperatorWork("linears", "mlp", 1, "float16", 1e9, 1_000_000_000, 0, 0)
    of = facts([read], flops_per_s=100e12, bytes_per_s=1e12)
    curve = tuple(CurvePoint(nbytes, per_s) for nbytes, per_s in ((2_000_000_000, 2.5e12), (1 << 34, 1e12)))
    of = replace(of, ceilings=replace(of.ceilings, curve=curve))
    [first, *_] = judge_run(measured(of, eager=0.5e-3)).answer
    assert "memory-bound: 500 us per step, at 80 % of the 2.50 TB/s measured here from its caches" in first


def test_products_in_two_dtypes_have_a_roof_between_theirs() -> None:
    """90 GFLOP at 100 TFLOP/s and 90 at 50 take at least 2.7 of 3 ms: 90 % of 66.7 TFLOP/s."""
    products = [OperatorWork(name, "mlp", 1, name, 90e9, 1, 0, 0) for name in ("float16", "int8")]
    of = facts(products, flops_per_s=100e12, bytes_per_s=1e12)
    of = replace(of, ceilings=replace(of.ceilings, compute={"float16": roof(100e12), "int8": roof(50e12)}))
    [first, *_] = judge_run(measured(of, eager=3e-3)).answer
    assert "compute-bound: 3.00 ms per step, at 90 % of the 66.7 TFLOP/s" in first


def test_a_graph_whose_cache_is_not_copied_proves_nothing_of_the_host() -> None:
    """A graph on a static cache saves the copies of the cache, and no time of the host.

    An eager step has 1 GB of weights, 10 GB of KV cache and 20 GB of copies. It takes 31.5 ms on a GPU of 1 TB/s that
    hides its host. The graph takes 11.5 ms.
    """
    cached = OperatorWork("core", "attention", 1, "float16", 1e9, 0, 10_000_000_000, 0)
    weights = OperatorWork("linears", "mlp", 1, "float16", 1e9, 1_000_000_000, 0, 0)
    copied = replace(cached, avoidable_bytes={Cause.CACHE_COPIES: 20_000_000_000})
    of = measured(
        facts([weights, copied], flops_per_s=100e12, bytes_per_s=1e12, host_s=1e-3), eager=31.5e-3, graph=11.5e-3
    )
    graph = replace(KEY, cell=replace(CELL, engine="graph"))
    of = replace(of, operators={KEY: [weights, copied], graph: [weights, cached]}, graph_engines=frozenset({"graph"}))
    [eager] = [cell for cell in judge_run(of).judged if cell.key == KEY]
    assert eager.verdict.regime == "memory-bound"
    assert Flag.HOST not in eager.verdict.flags


def test_each_engine_is_named_once() -> None:
    weights = OperatorWork("linears", "mlp", 1, "float16", 1e9, 2_200_000_000, 0, 0)
    of = facts([weights], flops_per_s=100e12, bytes_per_s=1e12, host_s=1e-3)
    of = replace(measured(of, eager=10e-3, graph=2.8e-3, static=12e-3), graph_engines=frozenset({"graph"}))
    text = " ".join(judge_run(of).answer)
    assert "overhead-bound: of 10.0 ms, the same work as one graph saves 7.20 ms" in text
    assert f"What to change: {GRAPHED} saves 7.20 ms of the 10.0 ms step (measured: the step takes 2.80 ms" in text
    assert 'To change it, write: model.generate(..., cache_implementation="static").' in text
    assert "The engine static costs 2.00 ms of the 10.0 ms step against eager" in text
    assert "engine graph" not in text
    assert text.count("engine static") == 1


def step(phase: Phase, batch: int, dispatch_s: float, **more: Any) -> JudgedCell:
    """A step with 8 ms of weights and this dispatch."""
    parts = breakdown(8e-3 + dispatch_s, 8e-3, dispatch_s=dispatch_s)
    key = CellKey(phase, replace(CELL, batch_size=batch, prompt_len=64, context_len=0))
    return of_parts(parts, "mixed", key, **more)


def test_an_engine_named_for_a_prefill_is_still_compared_at_decode() -> None:
    """int4wo saves 7 of 10 ms of a decode step, the engine compile 1 ms of it, and 5 of 12 ms of a prefill."""

    def compiled(phase: Phase, saves_s: float) -> EngineDifference:
        context_len = 68 if phase == "decode" else 0
        return EngineDifference(phase, 1, 64, context_len, 8, "compile", "eager", saves_s, saves_s, saves_s, visits=3)

    of_decode, of_prefill = compiled("decode", 1e-3), compiled("prefill", 5e-3)
    tried = (TrialResult("int4wo", 0.3, 0.01, 2, 2),)
    decode = step("decode", 1, 2e-3, tried=tried, engines=(of_decode,))
    prefill = step("prefill", 1, 4e-3, engines=(of_prefill,))
    text = " ".join(answer([decode, prefill], SETTING, [of_decode, of_prefill]))
    assert "int4wo saves 7.00 ms of the 10.0 ms step" in text
    assert "In a prefill of 1 x 64 the engine compile saves 5.00 ms of 12.0 ms" in text
    assert "The engine compile saves 1.00 ms of the 10.0 ms step against eager: the cause is unknown" in text


def test_the_batch_to_change_to_is_the_best_and_not_the_largest() -> None:
    """The steps of batches 1, 8 and 64 take 10, 15 and 600 ms: batch 8 gives 5.3 times the tokens/s."""
    cells = []
    for batch, latency_s in ((1, 10e-3), (8, 15e-3), (64, 600e-3)):
        parts = breakdown(latency_s, 8e-3, unexplained_s=latency_s - 8e-3)
        cell = of_parts(parts, "memory-bound", CellKey("decode", replace(CELL, batch_size=batch)))
        cells.append(replace(cell, tokens_per_s=batch / latency_s))
    [*_, change] = answer(cells, SETTING)
    assert "batch 8 gives 5.3x the tokens/s for 1.5x the step" in change


def test_the_change_of_the_step_comes_before_its_batch_and_the_prefill_has_a_line_of_its_own() -> None:
    """nf4 saves 7 of 10 ms of a decode step, and a 16-bit dtype half of a prefill of 8 x 64."""
    tried = step("decode", 1, 2e-3, tried=(TrialResult("nf4", 0.3, 0.01, 2, 2),))
    halved = step("prefill", 8, 2e-3, tried=(TrialResult("bfloat16", 0.5, 0.01, 2, 2),))
    larger = replace(step("decode", 8, 2e-3), tokens_per_s=800.0)
    changes = answer([tried, larger, halved], SETTING)[2:]
    assert [text.partition(" saves")[0].partition("write:")[0] for text in changes] == [
        "What to change: nf4", "To change it, ", "Batch 8 gives 8.0x the tokens/s for 1.0x the step, 1.25 ms a token.",
        "In a prefill of 8 x 64 bfloat16",
    ]  # fmt: skip
    assert changes[-1].endswith("To change it, write: from_pretrained(..., dtype=torch.bfloat16).")


@pytest.mark.parametrize(
    ("regimes", "words"),
    [
        (["memory-bound", "compute-bound", "compute-bound"], "Prefill is compute-bound from 512 tokens"),
        (["compute-bound"] * 3, "Prefill is compute-bound: up to"),
        (["memory-bound", "compute-bound", "mixed"], "Prefill at batch 32 x 64 is mixed"),
    ],
)
def test_a_prefill_is_compute_bound_from_where_all_larger_ones_are(regimes: list[Regime], words: str) -> None:
    cells = [
        replace(step("prefill", batch, 1e-3), verdict=Verdict(regime, "high", (), ()), flops_per_s=batch * 1e12)
        for batch, regime in zip((1, 8, 32), regimes, strict=True)
    ]
    assert words in answer(cells, SETTING)[0]
    below = [replace(cell, clock_share=0.5, roof_flops_per_s=50e12) for cell in cells]
    assert ("50.0 TFLOP/s at its clock (100 TFLOP/s measured here)" in answer(below, SETTING)[0]) == (
        "is mixed" not in words
    )
    above = [replace(cell, verdict=Verdict("compute-bound", "low", (), (Flag.ABOVE_ROOF,))) for cell in cells]
    assert "than a measured roof allows (" in answer(above, SETTING)[0]
    assert answer(above, SETTING)[0].endswith(": a roof is too low or a count too high.")


@pytest.mark.parametrize(
    ("regime", "terms", "group", "words"),
    [
        ("link-bound", {"link_s": 6e-3}, COLLECTIVE, "the ranks' results take 6.00 ms to cross the link"),
        ("link-bound", {"link_s": 6e-3}, "mlp", "weights take 6.00 ms to cross to the device"),
        ("overhead-bound", {"generate_s": 6e-3}, "mlp", "generate itself takes 6.00 ms"),
    ],
)
def test_the_answer_names_what_takes_the_time(regime: Regime, terms: dict[str, float], group: str, words: str) -> None:
    work = OperatorWork("one", group, 1, "float16", 1e9, 0, 0, 0)
    cell = replace(step("decode", 1, 0.0), split=breakdown(10e-3, 4e-3, **terms), operators=(work,))
    assert words in answer([replace(cell, verdict=Verdict(regime, "high", (), ()))], SETTING)[0]


@pytest.mark.parametrize(
    ("of_step", "of_prefill", "words"),
    [
        ("float16", "bfloat16", "Instead of the step's change, write: from_pretrained(..., dtype=torch.bfloat16)."),
        ("nf4", "bfloat16", "To change it, write: from_pretrained(..., dtype=torch.bfloat16)."),
        ("bfloat16", "bfloat16", "(tried: the step takes 5.00 ms then)."),
    ],
)
def test_a_line_of_the_prefill_that_excludes_that_of_the_step_says_so(
    of_step: str, of_prefill: str, words: str
) -> None:
    decode = step("decode", 1, 2e-3, tried=(TrialResult(of_step, 0.5, 0.01, 2, 2),))
    prefill = step("prefill", 8, 2e-3, tried=(TrialResult(of_prefill, 0.5, 0.01, 2, 2),))
    assert answer([decode, prefill], SETTING)[-1].endswith(words)


def test_terms_of_a_difference_are_listed_largest_first() -> None:
    difference = EngineDifference(
        "decode", 1, 64, 80, 32, "vllm", against="eager", saves_s=5.1e-3, low_s=5e-3, high_s=5.2e-3,
        terms={"dispatch_s": -4.4e-3, "avoidable_s": -0.9e-3, "engine_s": 0.3e-3, "kv_s": -0.1e-3},
        causes={"cache copies": -0.9e-3},
    )  # fmt: skip
    assert where_it_lies(difference) == [
        "dispatch -4.40 ms",
        "cache copies -900 us",
        "the engine's own (scheduler, sampler, launches, its kernels' losses) +300 us",
    ]
