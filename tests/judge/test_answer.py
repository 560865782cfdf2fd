"""The answer about cells whose limits are known."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from machines import ceiling
from made_facts import breakdown, facts, judged, pairs

from profiler.facts.ceilings import CurvePoint
from profiler.facts.operators import Cause, OperatorWork
from profiler.facts.repetitions import Repetition
from profiler.facts.run_facts import Facts
from profiler.grid.cells import Cell, CellKey, Grid, Phase
from profiler.judge.answer import answer_of
from profiler.judge.breakdown import TimeBreakdown
from profiler.judge.cell_stages import Judged
from profiler.judge.changes import Setting, changes
from profiler.judge.judge_run import judge_run
from profiler.judge.regimes import Flag, Regime, Verdict
from profiler.loading.changes import Circumstances

CELL = Cell(batch_size=1, prompt_len=0, new_tokens=8, context_len=64)
KEY = CellKey("decode", CELL)
CASES = list(csv.DictReader(Path(__file__).with_name("answers.csv").read_text().splitlines()))
SETTING = Setting(1e12, 100e12, weight_bits=4.5, here=Circumstances(True, "float16"))


def of_parts(parts: TimeBreakdown, regime: Regime, key: CellKey = KEY, *operators: OperatorWork, **more: Any) -> Judged:
    """Return a judged step with these parts, under ceilings of 1 TB/s and 100 TFLOP/s."""
    return judged(key, parts, Verdict(regime, "high", (), ()), *operators, **more)


def answer(cells: Sequence[Judged], setting: Setting) -> tuple[str, ...]:
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


def cell_of(text: str) -> Judged:
    """A cell of a row of answers.csv: phase, batch, regime, terms in ms, and its FLOPs or the group of its operator."""
    phase, batch, regime, *known = text.split()
    given = pairs(" ".join(known))
    work = OperatorWork("one", given.pop("group", "mlp"), 1, "float16", given.pop("flops", 1e9), 0, 0, 0)
    grade = given.pop("grade", "quiet")
    terms = {f"{name}_s": ms / 1e3 for name, ms in given.items()}
    lengths = {"prompt_len": 64} if phase == "prefill" else {"prompt_len": 0, "context_len": 64}
    key = CellKey(cast(Phase, phase), Cell(int(batch), new_tokens=8, **lengths))
    return of_parts(breakdown(**terms), cast(Regime, regime), key, work, grade=grade)


@pytest.mark.parametrize("case", CASES, ids=[case["reason"] for case in CASES])
def test_an_answer_says_what_its_cells_show(case: dict[str, str]) -> None:
    """In any of its sentences; `!` precedes words that it does not have."""
    said = " ".join(answer([cell_of(text) for text in case["cells"].split("|")], SETTING))
    for words in case["words"].split("|"):
        assert (words.removeprefix("!") in said) == (not words.startswith("!")), said


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
