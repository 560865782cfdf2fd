"""The answer about cells whose limits are known, and its advice.

Advice is a line that was executed, with what it does to step, prefill and tokens; the rest is not tried.
"""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from machines import ceiling
from made_facts import breakdown, facts, judged, pairs

from profiler.effort import STANDARD
from profiler.facts.ceilings import CurvePoint
from profiler.facts.change_ids import ChangeId
from profiler.facts.measurements import NotTried, StepSamples, Trial
from profiler.facts.operators import Cause, OperatorWork
from profiler.facts.repetitions import Repetition
from profiler.facts.run_facts import Facts
from profiler.grid.cells import Cell, CellKey, Grid, Phase
from profiler.judge.answer import Answer, answer_of, budget_for
from profiler.judge.breakdown import TimeBreakdown
from profiler.judge.cell_stages import Judged
from profiler.judge.changes import Setting, changes
from profiler.judge.judge_run import judge_run
from profiler.judge.regimes import Flag, Regime, Verdict
from profiler.judge.savings import ChangeEffect, TrialResult
from profiler.loading.changes import Circumstances

CELL = Cell(batch_size=1, prompt_len=0, new_tokens=8, context_len=64)
KEY = CellKey("decode", CELL)
CASES = list(csv.DictReader(Path(__file__).with_name("answers.csv").read_text().splitlines()))
SETTING = Setting(1e12, 100e12, weight_bits=4.5, here=Circumstances(True, "float16"))


def of_parts(parts: TimeBreakdown, regime: Regime, key: CellKey = KEY, *operators: OperatorWork, **more: Any) -> Judged:
    """Return a judged step with these parts, under ceilings of 1 TB/s and 100 TFLOP/s."""
    return judged(key, parts, Verdict(regime, "high", (), ()), *operators, **more)


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
    cells = [cell_of(text) for text in case["cells"].split("|")]
    said = " ".join(answer(*(replace(cell, changes=tuple(changes(cell, SETTING))) for cell in cells)).sentences)
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


LINE = "from_pretrained(..., dtype=torch.bfloat16)"


def result(before_s: float, after_s: float, change: ChangeId = ChangeId.DTYPE, **more: Any) -> TrialResult:
    """A trial on 8 of 30 layers, whose times are known to 1 %."""
    known = {"form": change.value, "layers": 8, "of_layers": 30, "line": LINE, "change": change, **more}
    trial = Trial(KEY, before=StepSamples((), ()), after=StepSamples((), ()), **known)
    return TrialResult(trial, after_s / before_s, 0.01, before_s)


def cell(phase: Phase, latency_s: float, *tried: TrialResult, batch: int = 1, **more: Any) -> Judged:
    """A prefill or a step of 64 tokens, half of it unexplained."""
    parts = breakdown(weights_s=latency_s / 2, unexplained_s=latency_s / 2)
    return of_parts(parts, "mixed", CellKey(phase, Cell(batch, 64, 32)), tried=tried, **more)


def answer(*cells: Judged, cut: Sequence[NotTried] = ()) -> Answer:
    return answer_of(cells, SETTING, cut=cut)


def on_changes(found: Answer) -> list[str]:
    """The sentences on changes, which follow those on decode and prefill."""
    return [text for text in found.sentences if not text.startswith(("Decode", "Prefill"))]


def test_a_line_says_what_step_and_prefill_become_and_from_where_on_it_pays() -> None:
    """On a CPU without bfloat16 units each token saves 38 ms, and the prefill costs 705: (942 - 237) / (80 - 42)."""
    step, prefill = cell("decode", 80e-3, result(80e-3, 42e-3)), cell("prefill", 237e-3, result(237e-3, 942e-3))
    found = answer(step, prefill)
    [advice] = found.advised
    assert (advice.change, advice.line, advice.pays_from_tokens) == (ChangeId.DTYPE, LINE, 19)
    assert on_changes(found) == [
        f"What to change: {LINE}: a step of 42.0 ms instead of 80.0 ms, a prefill of 942 ms instead of 237 ms at 1 x 64"
        " (tried, on 8 of 30 layers); it pays from 19 new tokens per prompt on."
    ]
    [faster] = answer(step, cell("prefill", 237e-3, result(237e-3, 200e-3))).advised
    assert faster.pays_from_tokens is None, "it always does"
    [unknown] = answer(step).advised
    assert unknown.prefill is None


def test_a_change_is_advised_where_the_time_itself_is_not_well_known() -> None:
    """Its trial took turns, which show the difference. No other cell calls its line untried."""
    swinging = cell("decode", 80e-3, result(80e-3, 42e-3), grade="unusable")
    found = answer(swinging, cell("decode", 90e-3, batch=4, changes=(replace(computed(70e-3), how=LINE),)))
    assert found.sentences[0].startswith("Decode at batch 4")
    assert [item.line for item in found.advised] == [LINE]
    assert found.not_tried == ()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"once_s": 24.0}, "; it takes 24.0 s once."),
        ({"tokens": 8, "same_tokens": 8}, "; the same tokens."),
        ({"tokens": 8, "same_tokens": 5}, "; 3 of 8 tokens differ."),
        ({"change": ChangeId.FORMAT}, "; tokens were not compared."),
        ({"layers": 30}, " at 1 x 64 (tried)."),
    ],
)
def test_a_line_says_what_it_costs_once_and_what_it_does_to_the_tokens(more: dict[str, Any], said: str) -> None:
    [sentence] = on_changes(answer(cell("decode", 80e-3, result(80e-3, 42e-3, **more))))
    assert sentence.endswith(said)


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        (ChangeId.DTYPE, ChangeId.FORMAT),
        (ChangeId.FORMAT, ChangeId.FORMAT),
        (ChangeId.STATIC_CACHE, ChangeId.COMPILED_STEP),
        (ChangeId.SDPA, ChangeId.EAGER_ATTENTION),
    ],
)
def test_of_changes_that_exclude_each_other_the_better_is_advised(slower: ChangeId, faster: ChangeId) -> None:
    both = (result(80e-3, 60e-3, slower, line="one"), result(80e-3, 40e-3, faster, line="other"))
    threads = result(80e-3, 70e-3, ChangeId.THREADS, line="torch.set_num_threads(1)")
    assert [item.change for item in answer(cell("decode", 80e-3, *both, threads)).advised] == [faster, ChangeId.THREADS]


def test_a_change_that_saves_more_of_the_prefill_is_advised_next_to_the_one_of_the_step() -> None:
    """Emulated bfloat16: int4 saves 8 ms of a step; float32 saves 70 % of the prefill, and costs 10 ms a step."""
    four_bits, wide = {"change": ChangeId.FORMAT, "line": "int4"}, {"line": "float32"}
    step = cell("decode", 34e-3, result(34e-3, 26e-3, **four_bits), result(34e-3, 44e-3, **wide))
    prefill = cell("prefill", 330e-3, result(330e-3, 150e-3, **four_bits), result(330e-3, 95e-3, **wide))
    found = answer(step, prefill)
    assert [item.line for item in found.advised] == ["int4", "float32"]
    assert on_changes(found)[1].endswith("; it pays up to 23 new tokens per prompt.")
    alike = cell("prefill", 330e-3, result(330e-3, 150e-3, **four_bits), result(330e-3, 145e-3, **wide))
    assert [item.line for item in answer(step, alike).advised] == ["int4"]


def test_a_change_without_a_line_is_measured_and_not_advised() -> None:
    graph = result(80e-3, 20e-3, ChangeId.GRAPH, line="", form="one CUDA graph per step", layers=30)
    found = answer(cell("decode", 80e-3, graph))
    assert found.advised == ()
    assert on_changes(found) == [
        "Tried, but no line to copy: with one CUDA graph per step the 80.0 ms step takes 20.0 ms."
    ]


def computed(saves_s: float, change: ChangeId = ChangeId.COMPILED_STEP) -> ChangeEffect:
    return ChangeEffect(change.value, saves_s, "arithmetic", at_least_s=saves_s, how="a line", id=change,
                 preparing_s=60.0)  # fmt: skip


def test_a_computed_saving_never_leads() -> None:
    """It follows the tried change and the batch, and is left out if it promises less than was found."""
    step = cell("decode", 80e-3, result(80e-3, 60e-3), changes=(computed(70e-3),))
    found = answer(step, cell("decode", 90e-3, batch=8))
    assert [text.split(":")[0] for text in on_changes(found)] == ["What to change", "8 sequences a step", "Not tried"]
    assert [item.id for item in found.not_tried] == [ChangeId.COMPILED_STEP]
    assert on_changes(found)[-1] == (
        "Not tried: a line. Of the 80.0 ms step of 1 x 64 it would save about 70.0 ms (computed:"
        f" arithmetic). It compiles for about 60 s once, for which --budget {budget_for(60.0)} has time."
    )
    assert answer(replace(step, changes=(computed(10e-3),))).not_tried == ()
    only = answer(replace(step, tried=()))
    assert only.advised == ()
    assert [item.id for item in only.not_tried] == [ChangeId.COMPILED_STEP]


def test_a_budget_has_time_for_a_trial_after_those_of_a_minute() -> None:
    share = STANDARD.shares["trials"]
    for trial_s in (1.0, 59.0, 61.0):
        assert share * 60 + trial_s <= share * budget_for(trial_s) <= share * 90 + trial_s


def test_at_most_five_sentences_are_on_changes_and_one_of_them_names_what_was_cut() -> None:
    """A new length, two lines, a graph and a batch, which leave no room for what is only computed."""
    lines = (result(80e-3, 40e-3), result(80e-3, 50e-3, ChangeId.THREADS, line="torch.set_num_threads(1)"))
    graph = result(80e-3, 20e-3, ChangeId.GRAPH, line="")
    shape = Cell(1, 64, 32)
    repetition = Repetition(shape, 0, None, (80e-3,) * 8, 1.0, (), None, 0.0, first_decode_s=(0.2,) * 8)
    step = cell("decode", 80e-3, *lines, graph, repetitions=[repetition], changes=(computed(75e-3),))
    batch = cell("decode", 90e-3, batch=8)
    prefill = cell("prefill", 1.0, changes=(computed(0.5, ChangeId.COMPILED_FORWARD),))
    found = answer(step, batch, prefill)
    assert [text.split(" ")[0] for text in on_changes(found)] == ["The", "What", "By", "Tried,", "8"]
    assert found.not_tried == (), "only what a sentence names"
    cut = [
        NotTried("nf4 weights", "another line", ChangeId.FORMAT, 20.0),
        NotTried("a compiled step", "a line", ChangeId.COMPILED_STEP, 65.0),
    ]
    found = answer(step, batch, prefill, cut=cut)
    assert len(on_changes(found)) == 5
    assert on_changes(found)[-1] == (
        f"No time was left to try nf4 weights, a compiled step: --budget {budget_for(20)} has time for all but a"
        f" compiled step, {budget_for(85)} for it."
    )
    [without_time, untried] = on_changes(answer(cell("decode", 80e-3, changes=step.changes), prefill, cut=cut))
    assert without_time.startswith("No time was left")
    assert untried.endswith("It compiles for about 60 s once."), "its budget is said already"
