"""The committed runs are those that today's rules give: a changed rule changes them in the same commit."""

import csv
import re
import shutil
from pathlib import Path

import pytest

from profiler.errors import RunError
from profiler.facts.change_ids import ChangeId
from profiler.judge.cells import CellEvidence, CellResult
from profiler.judge.savings import ChangeEffect
from profiler.run.judge_folder import judge_folder
from profiler.store.folder import read_run

REFERENCE = Path(__file__).parents[2] / "runs/reference"
FOLDERS = sorted(file.parent for file in REFERENCE.glob("**/run.json"))
EXPERT = {row["run"]: row for row in csv.DictReader(Path(__file__).with_name("expert.csv").read_text().splitlines())}
"""The labels by phase that an expert on these machines would agree with, and the reason."""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(REFERENCE)))
def test_a_committed_run_is_judged_as_it_is_stored(folder: Path, tmp_path: Path) -> None:
    """A run without operators.csv, from a version that did not write it, is still read."""
    stored = read_run(folder)
    again = tmp_path / folder.name
    shutil.copytree(folder, again, ignore=shutil.ignore_patterns("*.png", "*.html"))
    if not (folder / "operators.csv").exists():
        with pytest.raises(RunError, match="cannot be judged again"):
            judge_folder(again)
        return
    judge_folder(again, finished=True)
    assert (again / "cells.csv").read_text() == (folder / "cells.csv").read_text()
    judged = read_run(again)
    assert judged.answer == stored.answer
    for part in ("evidence", "advised", "not_tried"):
        assert getattr(judged.document, part) == getattr(stored.document, part)


def explained(folder: Path) -> list[CellResult]:
    return [row for row in read_run(folder).measured if abs(row.unexplained_s) <= 0.20 * row.latency_s]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_explained_cell_is_never_inconclusive(folder: Path) -> None:
    """A run without operators.csv was judged by older rules."""
    old = not (folder / "operators.csv").exists()
    assert old or not [row.key.name for row in explained(folder) if row.regime == "inconclusive"]


@pytest.mark.parametrize("name", EXPERT)
def test_labels_are_those_of_an_expert(name: str) -> None:
    rows, expert = explained(REFERENCE / name), EXPERT[name]
    assert len(rows) > 5
    wrong = {row.key.name: row.regime for row in rows if row.regime not in expert[row.phase].split("|")}
    # One cell in ten may be close to another label.
    assert len(wrong) <= len(rows) / 10, wrong


def effect_of(evidence: CellEvidence, change: ChangeId) -> ChangeEffect:
    [found] = [item for item in evidence.changes if item.id is change]
    return found


def test_an_h100s_figures_are_its_own() -> None:
    """Figures that were computed from the raw samples of `mistral-7b-h100` by other code than the profiler's."""
    run = read_run(REFERENCE / "mistral-7b-h100")
    cells = {(row.phase, row.batch_size, row.prompt_len): row for row in run.measured}
    evidence = {(item.phase, item.batch_size, item.prompt_len): item for item in run.document.evidence}
    decodes = [row for row in run.measured if row.phase == "decode"]
    assert {row.regime for row in decodes} == {"overhead-bound"}
    # A decode step of 200 to 300 W is at no limit of 700 W, and the probe's memory part moved by 0.9 %.
    assert not any("power-capped" in evidence["decode", row.batch_size, row.prompt_len].flags for row in decodes)
    assert not any("drifted" in why for item in run.document.evidence for why in item.noise_reasons)
    # Of the samples of prefill 1 x 64, order statistics say 26.2 to 47.1 ms.
    small = cells["prefill", 1, 64]
    assert small.latency_low_s < 26.5e-3
    assert small.latency_high_s > 40e-3
    # 98 of 300 decode steps took less than 24.1 ms, which was the floor before.
    assert all(row.floor_s == pytest.approx(23.1e-3, rel=0.01) for row in decodes)
    # At 1.98 GHz the ceiling is 780 TFLOP/s, not the 700 of the power limit: no kernel is faster than its ceiling.
    ceilings = run.document.ceilings
    assert ceilings.compute["bfloat16"].per_s == pytest.approx(700e12, rel=0.01)
    assert ceilings.full_clock["bfloat16"] == pytest.approx(780e12, rel=0.01)
    assert cells["prefill", 4, 512].kernel_s > 0


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_a_computed_saving_contains_what_was_then_measured(gpu: str) -> None:
    """Eager runs compute a compiled step: 6.0 to 6.9 ms on an H100, 4.8 to 7.4 on an H200. It took 6.72 and 4.82 ms.

    The assumed shares were set with 6.72 known. The H200 was not known, and its step was tuned by inductor.
    """
    computed, measured = (read_run(REFERENCE / f"mistral-7b-{gpu}-{name}") for name in ("engines", "compile"))
    decodes = [item for item in computed.document.evidence if (item.phase, item.engine) == ("decode", "eager")]
    compiled = effect_of(decodes[0], ChangeId.COMPILED_STEP)
    rows = {row.engine: row for row in measured.measured if row.phase == "decode"}
    own_s = {row.engine: row.latency_s for row in computed.measured if row.phase == "decode"}["eager"]
    assert compiled.at_least_s is not None
    assert own_s - compiled.saves_s < rows["compile"].latency_s < own_s - compiled.at_least_s


def test_no_matmul_beats_its_ceiling_and_fusing_saves_at_most_what_a_trace_leaves() -> None:
    """A trace of an H200 has all 224 matmuls of prefill 8 x 512 in 74.0 ms; squares gave 671 TFLOP/s, 703 at the end.

    The matmuls need 57.2 TFLOP, so they ran at 772 TFLOP/s, and cannot need 85 ms. Of 110.8 ms, matmuls take 74.0 and
    attention about 2; fused, the rest moves 22.5 GB, 5.1 ms at 4.39 TB/s.
    """
    run = read_run(REFERENCE / "mistral-7b-h200-default")
    [row] = [row for row in run.measured if (row.phase, row.batch_size, row.prompt_len) == ("prefill", 8, 512)]
    fusing = effect_of(next(item for item in run.document.evidence if item.key == row.key), ChangeId.COMPILED_FORWARD)
    assert fusing.at_most
    assert 110.8e-3 - 74.0e-3 - 2e-3 - 5.1e-3 < fusing.saves_s < 32e-3
    assert 74.0e-3 < row.compute_s < 76e-3
    document = run.document
    assert document.ceilings.full_clock["bfloat16"] == pytest.approx(772e12, rel=2e-3)
    [raised] = [text for text in document.warnings if "too low" in text]
    assert "682 TFLOP/s was too low, and is raised to 773 TFLOP/s, the rate of 224 matmuls" in raised
    ends = re.search(r"\((\d+) TFLOP/s to (\d+) TFLOP/s under load\)", " ".join(document.answer))
    assert ends is not None
    assert int(ends[1]) < 671 < 703 < int(ends[2])


def test_a_windows_memory_and_rolled_copies_are_those_of_a_real_gpu() -> None:
    """One layer's keys and values are repeated for 32 heads: 1.07 of 24.18 GB at batch 16.

    A trace saw concatenating take 26.2 of 77 ms at 16 x 4096 on an H200, 6.7 times what its bytes need at the ceiling.
    """
    run = read_run(REFERENCE / "mistral-7b-h200-window")
    peaks = {row.batch_size: row.peak_memory_bytes for row in run.measured}
    for item in run.document.evidence:
        assert item.predicted_peak_memory_bytes == pytest.approx(peaks[item.batch_size], rel=3e-3)
    row = next(row for row in run.measured if row.batch_size == 16)
    assert row.redundant_s == pytest.approx(26.2e-3, rel=0.01)
    # The trace, the replays and the ceilings are measured apart, and add up to the step.
    assert abs(row.unexplained_s) < 0.03 * row.latency_s


def test_a_step_of_compiled_kernels_is_explained_by_its_trace() -> None:
    """inductor's kernels run for 4.815 of 4.82 ms; weights need 3.24 at the ceiling, and the kernels lose the rest."""
    run = read_run(REFERENCE / "mistral-7b-h200-compile")
    row = next(row for row in run.measured if row.phase == "decode")
    assert row.kernel_s == pytest.approx(4.815e-3 - 3.25e-3, rel=0.03)
    assert abs(row.unexplained_s) < 0.01 * row.latency_s
