"""The oracles: each detects its own failure, and a silent loss planted into the profiler is detected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated.native import why_not

from profiler.run.stages import Stages

from .campaign import recorded
from .oracles import Case, Folder, Ran, failures, read
from .scenarios import SCENARIOS
from .sites import Call, Injection, Site
from .trial import tried

KEYS = {
    ("eager", "prefill", "1", "16", "0"): "eager/1/16",
    ("eager", "decode", "1", "16", "20"): "eager/1/16",
    ("eager", "decode", "2", "16", "20"): "eager/2/16",
}
ROW = {
    "status": "ok", "model_flops": "10", "model_bytes": "20", "executed_flops": "10", "executed_bytes": "20",
    "intensity": "0.5", "latency_s": "0.001", "ttft_s": "", "first_step_s": "0.001", "issue_s": "0.001", "visits": "4",
    "confidence": "high", "attained": "0.5", "regime": "memory-bound",
}  # fmt: skip
ROWS = {
    key: dict(zip(("engine", "phase", "batch_size", "prompt_len", "context_len"), key, strict=True)) | ROW
    for key in KEYS
}
WHOLE = Folder(ROWS, {"finished": True, "missing": []}, frozenset({"visit", "dispatch eager decode 1"}))
BASE = Ran(0, "a table", "", "", (), (), (), 100, 5.0, WHOLE)
SITE = Site("torch.cuda.synchronize", "measure/replay.py:1")
WHY = "CUDA error: invalid argument"


def case(
    first: Ran, resumed: Ran | None = None, *, kind: str = "passing", cell: str = "", stage: str = "replays"
) -> Case:
    """Return a case with a fault in a visit of `cell`, or between visits."""
    fired = (Call(SITE, 1, stage, cell),)
    return Case(Injection(SITE, 1, kind, "once", "eager"), BASE, replace(first, fired=fired), resumed)


def with_rows(changes: Mapping[tuple[str, ...], Mapping[str, str]], **document: Any) -> Folder:
    rows = {key: row | dict(changes.get(key, {})) for key, row in ROWS.items()}
    return replace(WHOLE, rows=rows, document={**WHOLE.document, **document})


FIRST, SECOND, THIRD = KEYS
LOST = replace(WHOLE, facts=frozenset({"visit"}))
NAMED = replace(
    LOST, document={"finished": True, "missing": [{"what": "dispatch", "why": f"AcceleratorError: {WHY}"}]}, report=WHY
)


def test_a_run_without_changes_has_no_failure() -> None:
    assert failures(case(BASE)) == []


def test_executed_work_may_differ_if_its_rule_is_reported_missing() -> None:
    missing = [{"what": "the choice of kernels", "why": WHY}]
    for name, passes in (("executed_bytes", True), ("model_bytes", False)):
        folder = with_rows({FIRST: {name: "21"}}, missing=missing)
        assert (failures(case(replace(BASE, code=3, folder=folder))) == []) is passes


@pytest.mark.parametrize(
    ("first", "oracle"),
    [
        (replace(BASE, code=1, err="roofscope: internal error"), "ends_by_a_documented_code"),
        (replace(BASE, code=None, escaped="ValueError"), "ends_by_a_documented_code"),
        (replace(BASE, err="one\ntwo"), "says_one_line"),
        (replace(BASE, err="Traceback (most recent call last):"), "says_one_line"),
        (replace(BASE, code=2, err="roofscope: no"), "may_end"),
        (replace(BASE, folder=replace(WHOLE, rows={FIRST: ROWS[FIRST]})), "keeps_every_cell"),
        (replace(BASE, folder=with_rows({FIRST: {"model_flops": "11"}})), "leaves_other_cells_alone"),
        (replace(BASE, folder=with_rows({FIRST: {"executed_bytes": "21"}})), "leaves_other_cells_alone"),
        (replace(BASE, folder=with_rows({FIRST: {"latency_s": "0.0010011"}})), "leaves_other_cells_alone"),
        (replace(BASE, folder=with_rows({FIRST: {"first_step_s": ""}})), "leaves_other_cells_alone"),
        (replace(BASE, folder=with_rows({FIRST: {"status": "failed"}})), "leaves_other_cells_alone"),
        (replace(BASE, left_bytes=101), "gives_memory_back"),
        (replace(BASE, simulated_s=100.0), "ends_in_time"),
        (replace(BASE, folder=LOST), "loses_nothing_in_silence"),
        (replace(BASE, code=3, folder=LOST), "loses_nothing_in_silence"),
        (replace(BASE, code=0, folder=NAMED, out=WHY), "loses_nothing_in_silence"),
        (replace(BASE, code=3, folder=NAMED), "loses_nothing_in_silence"),
        (replace(BASE, code=3, folder=replace(NAMED, report=""), out=WHY), "loses_nothing_in_silence"),
    ],
)
def test_each_oracle_detects_its_failure(first: Ran, oracle: str) -> None:
    assert {failure.partition(":")[0] for failure in failures(case(first))} == {oracle}


def test_an_unknown_status_is_detected() -> None:
    found = failures(case(replace(BASE, folder=with_rows({FIRST: {"status": "lost"}})), cell="eager/1/16"))
    assert [failure.partition(":")[0] for failure in found] == ["keeps_every_cell"]


def test_a_reported_loss_with_exit_code_3_is_no_failure() -> None:
    assert failures(case(replace(BASE, code=3, folder=NAMED, out=f"dispatch failed ({WHY})"), BASE)) == []


def test_a_cell_with_the_fault_may_fail() -> None:
    failed = replace(BASE, code=3, folder=with_rows({THIRD: {"status": "failed"}}))
    assert failures(case(failed, BASE, cell="eager/2/16")) == []
    assert failures(case(failed, BASE, cell="eager/1/16"))[0].startswith("leaves_other_cells_alone: eager/decode/2/16")


@pytest.mark.parametrize("stage", ["", "loading"])
def test_a_load_may_end_a_run(stage: str) -> None:
    assert failures(case(replace(BASE, code=2, folder=None), stage=stage)) == []


def test_a_lost_device_may_end_a_run() -> None:
    ended = replace(BASE, code=2, folder=with_rows({THIRD: {"status": "skipped"}}, finished=False))
    assert failures(case(ended, BASE, kind="sticky")) == []


@pytest.mark.parametrize(
    ("changes", "sure"),
    [
        ({"latency_s": "0.002"}, True),
        ({"latency_s": "0.002", "confidence": "medium"}, False),
        ({"attained": "0.9"}, True),
        ({"regime": "compute-bound"}, True),
        ({"attained": "0.51"}, False),
    ],
)
def test_a_false_figure_never_has_high_confidence(changes: dict[str, str], sure: bool) -> None:
    found = failures(case(replace(BASE, folder=with_rows({FIRST: changes})), kind="tenfold", cell="eager/1/16"))
    assert [failure.partition(":")[0] for failure in found] == ["is_never_sure_of_a_lie"] * sure


@pytest.mark.parametrize(
    "resumed",
    [
        replace(BASE, code=2, err="roofscope: finished"),
        replace(BASE, folder=with_rows({}, finished=False)),
        replace(BASE, folder=with_rows({THIRD: {"status": "failed"}})),
        replace(BASE, folder=with_rows({THIRD: {"latency_s": "0.0011"}})),
        replace(BASE, folder=LOST),
    ],
)
def test_a_resume_has_to_repair_the_run(resumed: Ran) -> None:
    first = replace(BASE, code=3, folder=NAMED, out=WHY)
    assert {failure.partition(":")[0] for failure in failures(case(first, resumed))} == {"heals"}


def test_facts_of_a_folder_are_not_empty(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"ceilings": {"memory": {"read": null, "copy": 1.0}}, "finished": true}')
    (tmp_path / "samples.jsonl").write_text(
        '{"kind": "dispatch", "engine": "eager", "phase": "decode", "batch_size": 2}\n'
    )
    found = read(tmp_path)
    assert found is not None
    assert found.facts == {"dispatch eager decode 2", "run.json.ceilings.memory.copy", "run.json.finished"}


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_planted_silent_loss_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel fails once during replays, and the run reports it. The planted loss suppresses that report."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known = recorded(SCENARIOS["eager"], tmp_path)
    [call, *_] = [call for call in known.base.calls if call.site.api == "kernel" and call.stage == "replays"]
    fault = Injection(call.site, call.number, "passing", "once", "eager")
    assert tried(fault, known.played, known.model, known.base).failures == ()
    monkeypatch.setattr(Stages, "miss", lambda *_: None)
    caught = {failure.partition(":")[0] for failure in tried(fault, known.played, known.model, known.base).failures}
    assert "loses_nothing_in_silence" in caught
