"""The answer about cells whose limits are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from machines import ceiling
from made_facts import facts

from profiler.facts.ceilings import CurvePoint
from profiler.facts.operators import COLLECTIVE, Cause, OperatorWork
from profiler.facts.repetitions import Repetition
from profiler.facts.run_facts import Facts
from profiler.grid.cells import Cell, CellKey, Grid, Phase
from profiler.judge.answer import answer_of
from profiler.judge.breakdown import TimeBreakdown
from profiler.judge.cells import JudgedCell
from profiler.judge.changes import Setting, changes
from profiler.judge.judge_run import judge_run
from profiler.judge.regimes import Flag, Regime, Verdict
from profiler.loading.changes import Circumstances

CELL = Cell(batch_size=1, prompt_len=0, new_tokens=8, context_len=64)
KEY = CellKey("decode", CELL)
SETTING = Setting(1e12, 100e12, weight_bits=4.5, here=Circumstances(True, "float16"))


def breakdown(latency_s: float, weights_s: float, **terms: float) -> TimeBreakdown:
    """Return a breakdown at the ceiling of its weights; terms that are not given are 0."""
    zeros = dict.fromkeys(("kv_s", "compute_s", "dequantise_s", "kernel_s", "redundant_s", "overhead_s"), 0.0)
    return TimeBreakdown(
        latency_s=latency_s, device_s=weights_s, floor_s=weights_s, weights_s=weights_s,
        **{**zeros, "unexplained_s": 0.0, **terms},
    )  # fmt: skip


def of_parts(parts: TimeBreakdown, regime: Regime, key: CellKey = KEY, **more: Any) -> JudgedCell:
    """Return a judged step with these parts, under ceilings of 1 TB/s and 100 TFLOP/s."""
    return JudgedCell(key, 100.0, 1e9, 1e12, 1e12, 100e12, parts, Verdict(regime, "high", (), ()), **more)


def answer(cells: Sequence[JudgedCell], setting: Setting) -> tuple[str, ...]:
    """Return the answer about cells with their changes."""
    return answer_of([replace(cell, changes=tuple(changes(cell, setting))) for cell in cells], setting).sentences


def measured(of: Facts, **seconds: float) -> Facts:
    """Return the facts with four repetitions of each engine, at its seconds per step."""
    cells = {name: replace(CELL, engine=name) for name in seconds}
    return replace(
        of,
        operators={replace(KEY, cell=cell): work for cell in cells.values() for work in of.operators.values()},
        grid=Grid((), (1,), 8, context_lens=(64,), engines=tuple(seconds)),
        predicted_peak_bytes=dict.fromkeys(cells.values(), 1),
        repetitions={
            cell: [Repetition(cell, 0, None, (seconds[name],) * 8, 2.0, (), 1, 0.0)] * 4 for name, cell in cells.items()
        },
    )


@pytest.mark.parametrize(("attained", "unexplained", "words"), [
    (0.92, 0.02, "Nothing to gain but a faster device: this step is at 92 % of its roofline"),
    (0.30, 0.66, "No change is known that saves 5 %: this step is at 30 % of its roofline, and 66 % of it is unexpl"),
    (0.50, 0.02, "No change is known that saves 5 %: this step is at 50 % of its roofline."),
])  # fmt: skip
def test_only_a_step_near_its_ceiling_has_nothing_to_gain(attained: float, unexplained: float, words: str) -> None:
    parts = breakdown(1e-2, attained * 1e-2, unexplained_s=unexplained * 1e-2)
    cell = of_parts(parts, "memory-bound" if attained > 0.6 else "inconclusive")
    [*_, change] = answer([replace(cell, bytes_per_s=attained * 1e12)], SETTING)
    assert change.startswith(words)


def test_a_time_that_is_not_usable_is_in_no_headline() -> None:
    """Batch 1 is not usable, so batch 2 is the headline; of the prefills none is usable."""
    one, two = (replace(KEY, cell=replace(CELL, batch_size=batch)) for batch in (1, 2))
    prefill = CellKey("prefill", replace(CELL, prompt_len=64, context_len=0))
    cells = [
        of_parts(breakdown(2e-2, 1e-2), "memory-bound", one, usable=False),
        of_parts(breakdown(3e-2, 1e-2), "memory-bound", two),
        of_parts(breakdown(7e-2, 1e-2), "compute-bound", prefill, usable=False),
    ]
    first, unknown, *_ = said = answer(cells, SETTING)
    assert unknown == "No time of a prefill is known to within a tenth: measure again on a quieter machine."
    assert first.startswith("Decode at batch 2 is memory-bound: 30.0 ms per step")
    assert not any(time in " ".join(said) for time in ("20.0 ms", "70.0 ms"))


def test_a_share_is_of_the_ceiling_that_judged() -> None:
    """A step reads 1 GB at 2 TB/s; caches reach 2.5 TB/s and memory 1 TB/s, so the share is 80 %, not 200 %."""
    read = OperatorWork("linears", "mlp", 1, "float16", 1e9, 1_000_000_000, 0, 0)
    of = facts([read], flops_per_s=100e12, bytes_per_s=1e12)
    curve = tuple(CurvePoint(nbytes, per_s) for nbytes, per_s in ((2_000_000_000, 2.5e12), (1 << 34, 1e12)))
    of = replace(of, ceilings=replace(of.ceilings, curve=curve))
    [first, *_] = judge_run(measured(of, eager=0.5e-3)).answer.sentences
    assert "memory-bound: 500 µs per step, at 80 % of the 2.50 TB/s measured here from its caches" in first


def test_matmuls_in_two_dtypes_have_a_ceiling_between_theirs() -> None:
    """90 GFLOP at 100 TFLOP/s and 90 at 50 take at least 2.7 of 3 ms: 90 % of 66.7 TFLOP/s."""
    matmuls = [OperatorWork(name, "mlp", 1, name, 90e9, 1, 0, 0) for name in ("float16", "int8")]
    of = facts(matmuls, flops_per_s=100e12, bytes_per_s=1e12)
    of = replace(of, ceilings=replace(of.ceilings, compute={"float16": ceiling(100e12), "int8": ceiling(50e12)}))
    [first, *_] = judge_run(measured(of, eager=3e-3)).answer.sentences
    assert "compute-bound: 3.00 ms per step, at 90 % of the 66.7 TFLOP/s" in first


def test_a_graph_whose_cache_is_not_copied_proves_nothing_of_the_host() -> None:
    """A graph on a static cache saves the copies of the cache, and no time of the host.

    An eager step has 1 GB of weights, 10 GB of KV cache and 20 GB of copies. It takes 31.5 ms on a GPU of 1 TB/s that
    hides its host. The graph takes 11.5 ms.
    """
    cached = OperatorWork("core", "attention", 1, "float16", 1e9, 0, 10_000_000_000, 0)
    weights = OperatorWork("linears", "mlp", 1, "float16", 1e9, 1_000_000_000, 0, 0)
    copied = replace(cached, redundant_bytes={Cause.CACHE_COPIES: 20_000_000_000})
    of = measured(
        facts([weights, copied], flops_per_s=100e12, bytes_per_s=1e12, host_s=1e-3), eager=31.5e-3, graph=11.5e-3
    )
    graph = replace(KEY, cell=replace(CELL, engine="graph"))
    of = replace(of, operators={KEY: [weights, copied], graph: [weights, cached]}, graph_engines=frozenset({"graph"}))
    [eager] = [cell for cell in judge_run(of).judged if cell.key == KEY]
    assert eager.verdict.regime == "memory-bound"
    assert Flag.HOST not in eager.verdict.flags


def step(phase: Phase, batch: int, overhead_s: float, **more: Any) -> JudgedCell:
    """A step with 8 ms of weights and this overhead."""
    parts = breakdown(8e-3 + overhead_s, 8e-3, overhead_s=overhead_s)
    key = CellKey(phase, replace(CELL, batch_size=batch, prompt_len=64, context_len=0))
    return of_parts(parts, "mixed", key, **more)


def test_the_batch_to_change_to_is_the_best_and_not_the_largest() -> None:
    """The steps of batches 1, 8 and 64 take 10, 15 and 600 ms: batch 8 gives 5.3 times the tokens/s."""
    cells = []
    for batch, latency_s in ((1, 10e-3), (8, 15e-3), (64, 600e-3)):
        parts = breakdown(latency_s, 8e-3, unexplained_s=latency_s - 8e-3)
        cell = of_parts(parts, "memory-bound", CellKey("decode", replace(CELL, batch_size=batch)))
        cells.append(replace(cell, tokens_per_s=batch / latency_s))
    [*_, change] = answer(cells, SETTING)
    assert change == "8 sequences a step: 533 instead of 100 tokens/s, the step 50 % longer."


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
