"""Advice is a line that was executed, with what it does to step, prefill and tokens; the rest is not tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from made_facts import breakdown
from test_answer import KEY, SETTING, of_parts

from profiler.effort import STANDARD
from profiler.facts.change_ids import ChangeId
from profiler.facts.measurements import NotTried, StepSamples, Trial
from profiler.facts.repetitions import Repetition
from profiler.grid.cells import Cell, CellKey, Phase
from profiler.judge.answer import Answer, answer_of, budget_for
from profiler.judge.cell_stages import Judged
from profiler.judge.savings import ChangeEffect, TrialResult

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


def changes(found: Answer) -> list[str]:
    """The sentences on changes, which follow those on decode and prefill."""
    return [text for text in found.sentences if not text.startswith(("Decode", "Prefill"))]


def test_a_line_says_what_step_and_prefill_become_and_from_where_on_it_pays() -> None:
    """On a CPU without bfloat16 units each token saves 38 ms, and the prefill costs 705: (942 - 237) / (80 - 42)."""
    step, prefill = cell("decode", 80e-3, result(80e-3, 42e-3)), cell("prefill", 237e-3, result(237e-3, 942e-3))
    found = answer(step, prefill)
    [advice] = found.advised
    assert (advice.change, advice.line, advice.pays_from_tokens) == (ChangeId.DTYPE, LINE, 19)
    assert changes(found) == [
        f"What to change: {LINE}: a step of 42.0 ms instead of 80.0 ms, a prefill of 942 ms instead of 237 ms at 1 x 64"
        " (tried, on 8 of 30 layers); it pays from 19 new tokens per prompt on."
    ]
    [faster] = answer(step, cell("prefill", 237e-3, result(237e-3, 200e-3))).advised
    assert faster.pays_from_tokens is None, "it always does"
    [unknown] = answer(step).advised
    assert unknown.prefill is None


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
    [sentence] = changes(answer(cell("decode", 80e-3, result(80e-3, 42e-3, **more))))
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


def test_a_change_without_a_line_is_measured_and_not_advised() -> None:
    graph = result(80e-3, 20e-3, ChangeId.GRAPH, line="", form="one CUDA graph per step", layers=30)
    found = answer(cell("decode", 80e-3, graph))
    assert found.advised == ()
    assert changes(found) == [
        "Tried, but no line to copy: with one CUDA graph per step the 80.0 ms step takes 20.0 ms."
    ]


def computed(saves_s: float, change: ChangeId = ChangeId.COMPILED_STEP, preparing_s: float = 60.0) -> ChangeEffect:
    return ChangeEffect(change.value, saves_s, "arithmetic", at_least_s=saves_s, how="a line", id=change,
                 preparing_s=preparing_s)  # fmt: skip


def test_a_computed_saving_never_leads() -> None:
    """It follows the tried change and the batch, and is left out if it promises less than was found."""
    step = cell("decode", 80e-3, result(80e-3, 60e-3), changes=(computed(70e-3),))
    found = answer(step, cell("decode", 90e-3, batch=8))
    assert [text.split(":")[0] for text in changes(found)] == ["What to change", "8 sequences a step", "Not tried"]
    assert [item.id for item in found.not_tried] == [ChangeId.COMPILED_STEP]
    assert changes(found)[-1] == (
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
    assert [text.split(" ")[0] for text in changes(found)] == ["The", "What", "By", "Tried,", "8"]
    assert found.not_tried == (), "only what a sentence names"
    cut = [
        NotTried("nf4 weights", "another line", ChangeId.FORMAT, 20.0),
        NotTried("a compiled step", "a line", ChangeId.COMPILED_STEP, 65.0),
    ]
    found = answer(step, batch, prefill, cut=cut)
    assert len(changes(found)) == 5
    assert changes(found)[-1] == (
        f"No time was left to try nf4 weights, a compiled step: --budget {budget_for(20)} has time for all but a"
        f" compiled step, {budget_for(85)} for it."
    )
    [without_time, untried] = changes(answer(cell("decode", 80e-3, changes=step.changes), prefill, cut=cut))
    assert without_time.startswith("No time was left")
    assert untried.endswith("It compiles for about 60 s once."), "its budget is said already"
