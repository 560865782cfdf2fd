"""A run over unequal prompts pads and measures its cells; the report has the cost of padding and ways to avoid it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hurry import with_effort

import profiler
from profiler.grid.ragged import BUCKETED, PACKED, REFILLING, SORTED
from profiler.judge.breakdown import TERMS
from profiler.report.conditions import ragged
from profiler.run.judge_folder import judge_folder


@pytest.mark.slow
def test_a_run_over_unequal_prompts(
    tmp_path: Path, profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Enough time to try each way on a busy machine.
    with_effort(monkeypatch, queue_share=5.0)
    lengths = tmp_path / "lengths.txt"
    # Two batches of (16, 32, 16, 32): a quarter is padding; half of the sequences write half as many steps.
    lengths.write_text("16 5\n32 9\n16 5\n32 9\n" * 2)
    asked = {"prompt_lens": f"ragged:{lengths}", "batch_sizes": [4], "new_tokens": 32}
    run = profile_tiny(**asked, dtype="float32", budget_s=4)
    rows = {(row.phase, row.engine): row for row in run.results}
    assert set(rows) == {(phase, engine) for phase in ("prefill", "decode") for engine in ("padded", "eager")}
    padded, plain = rows["prefill", "padded"], rows["prefill", "eager"]
    assert (padded.prompt_len, padded.new_tokens, padded.padding) == (32, 9, 0.25)
    assert padded.tokens_per_s * padded.latency_s == pytest.approx(96)
    assert plain.tokens_per_s * plain.latency_s == pytest.approx(128)
    # Linears do a quarter less work for the prompts than for the padded shape; attention does even less.
    assert 0.70 < padded.model_flops / plain.model_flops < 0.75
    assert padded.executed_flops >= plain.model_flops
    step = rows["decode", "padded"]
    assert step.waiting_s == pytest.approx(step.latency_s * 0.25)
    for row in run.measured:
        assert sum(getattr(row, term) for term in TERMS) == pytest.approx(row.latency_s)
        assert (row.padding_s > 0) == (row.engine == "padded")
    first, second = sorted(run.document.ragged, key=lambda item: item.phase, reverse=True)
    assert [lever.change for lever in first.ways] == [SORTED, BUCKETED, PACKED]
    assert {lever.basis for lever in first.ways} == {"tried"}
    # Sorted, or in buckets of 16 and of 32, nothing is padded: this saves all time that a step spends on padding.
    assert [lever.change for lever in second.ways] == [SORTED, BUCKETED, REFILLING]
    assert [lever.saves_s for lever in second.ways] == pytest.approx([step.padding_s, step.padding_s, step.waiting_s])
    assert {lever.basis for lever in second.ways} == {"computed"}
    assert first.mask_s == pytest.approx(padded.mask_s)
    words = "\n".join(ragged(run).blocks[0].lines)
    assert "25 % of the positions are padding" in words
    assert "25 % of the time" in words
    # The run contains no home directory and no path of the machine.
    assert str(tmp_path) not in (run.folder / "run.json").read_text()
    assert run.document.command.count("ragged:lengths.txt") == 1
    kept = json.loads((run.folder / "run.json").read_text())
    judge_folder(run.folder)
    assert json.loads((run.folder / "run.json").read_text()) == kept
