"""The committed runs are those that today's rules give: a changed rule changes them in the same commit."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from profiler.errors import RunError
from profiler.facts.change_ids import ChangeId
from profiler.judge.cells import CellEvidence, CellResult, Lever
from profiler.judge.demand import TRAFFIC_TOLERANCE
from profiler.report.roofline_data import roof_lines
from profiler.run.judge_folder import judge_folder
from profiler.store.folder import read_run

REFERENCE = Path(__file__).parents[2] / "runs/reference"
FOLDERS = sorted(file.parent for file in REFERENCE.glob("**/run.json"))


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


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(REFERENCE)))
def test_a_committed_run_advises_nothing(folder: Path) -> None:
    """They executed no line; and `generate` compiles no model of bitsandbytes, for which a static line was printed."""
    document = read_run(folder).document
    assert document.advised == ()
    if document.model.quant == "nf4" and document.device.kind == "cuda":
        assert "static" not in " ".join(document.answer)
        ids = {lever.id for item in document.evidence for lever in item.levers}
        assert not ids & {ChangeId.COMPILED_STEP, ChangeId.COMPILED_FORWARD}


def test_an_answer_of_a_default_run_has_facts_before_what_was_not_tried() -> None:
    """A new length costs 59.1 ms on an H200; a graph was measured, of which nobody can write a line."""
    _, _, new_length, graph, batch, static, *_ = read_run(REFERENCE / "mistral-7b-h200-default").answer
    assert new_length.startswith("The first time at each KV length a step takes 59.1 ms, not 21.7 ms")
    assert "Not tried: torch.backends.cuda.enable_cudnn_sdp(False)" in new_length
    assert graph.startswith("Measured, not as a line: with a static cache and one CUDA graph per step")
    assert graph.endswith("takes 7.86 ms.")
    assert batch == "8 sequences a step: 389 instead of 46.1 tokens/s, at 8 x 512 and 1 x 64."
    assert static.startswith('Not tried: model.generate(..., cache_implementation="static").')
    assert "takes 4.62 ms to 5.40 ms" in static
    assert "It compiles for about 60 s once, for which --budget 360 has time." in static


def lever_of(evidence: CellEvidence, change: ChangeId) -> Lever:
    [found] = [item for item in evidence.levers if item.id is change]
    return found


def test_an_h100s_figures_are_its_own() -> None:
    """What an outside review computed from the raw samples of `mistral-7b-h100` (26 November 2026)."""
    run = read_run(REFERENCE / "mistral-7b-h100")
    cells = {(row.phase, row.batch_size, row.prompt_len): row for row in run.measured}
    evidence = {(item.phase, item.batch_size, item.prompt_len): item for item in run.document.evidence}
    decodes = [row for row in run.measured if row.phase == "decode"]
    assert {row.regime for row in decodes} == {"overhead-bound"}
    # The label is the same at both ends of an interval of 25 %, so this cell is noisy and not unusable.
    assert (cells["decode", 1, 64].noise, cells["decode", 1, 64].confidence) == ("noisy", "medium")
    # A decode step of 200 to 300 W is at no limit of 700 W, and the probe's memory part moved by 0.9 %.
    assert not any("power-capped" in evidence["decode", row.batch_size, row.prompt_len].flags for row in decodes)
    assert not any("drifted" in why for item in run.document.evidence for why in item.noise_reasons)
    # Of the samples of prefill 1 x 64, order statistics say 26.2 to 47.1 ms.
    small = cells["prefill", 1, 64]
    assert small.latency_low_s < 26.5e-3
    assert small.latency_high_s > 40e-3
    # 98 of 300 decode steps took less than 24.1 ms, which was the floor before.
    assert all(row.floor_s == pytest.approx(23.1e-3, rel=0.01) for row in decodes)
    # At 1.98 GHz the roof is 780 TFLOP/s, not the 700 of the power limit: no kernel is faster than its roof.
    ceilings = run.document.ceilings
    assert ceilings.compute["bfloat16"].per_s == pytest.approx(700e12, rel=0.01)
    assert ceilings.full_clock["bfloat16"] == pytest.approx(780e12, rel=0.01)
    assert [line.label for line in roof_lines(run) if line.label.startswith("until")] == [
        "until the power limit: 778 TFLOP/s bfloat16"
    ]
    assert cells["prefill", 4, 512].kernel_s > 0
    # Nothing was traced, so nothing is known of small kernels in a prefill.
    whole = [lever.because for item in run.document.evidence for lever in item.levers
             if lever.id is ChangeId.COMPILED_FORWARD]  # fmt: skip
    assert whole
    assert all(because.endswith("of the host") for because in whole)
    compiled = lever_of(evidence["decode", 1, 64], ChangeId.COMPILED_STEP)
    assert compiled.at_least_s is not None
    fastest_s, slowest_s = (
        cells["decode", 1, 64].latency_s - saves_s for saves_s in (compiled.saves_s, compiled.at_least_s)
    )
    assert slowest_s - fastest_s < 2e-3
    assert fastest_s < 6.3e-3 < slowest_s


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_a_computed_saving_contains_what_was_then_measured(gpu: str) -> None:
    """Eager runs compute a compiled step: 6.0 to 6.9 ms on an H100, 4.8 to 7.4 on an H200. It took 6.72 and 4.82 ms.

    The assumed shares were set with 6.72 known. The H200 was not known, and its step was tuned by inductor.
    """
    computed, measured = (read_run(REFERENCE / f"mistral-7b-{gpu}-{name}") for name in ("engines", "compile"))
    decodes = [item for item in computed.document.evidence if (item.phase, item.engine) == ("decode", "eager")]
    compiled = lever_of(decodes[0], ChangeId.COMPILED_STEP)
    rows = {row.engine: row for row in measured.measured if row.phase == "decode"}
    own_s = {row.engine: row.latency_s for row in computed.measured if row.phase == "decode"}["eager"]
    assert compiled.at_least_s is not None
    assert own_s - compiled.saves_s < rows["compile"].latency_s < own_s - compiled.at_least_s


def prefill_8_x_512(name: str) -> tuple[CellResult, CellEvidence]:
    run = read_run(REFERENCE / name)
    [row] = [row for row in run.measured if (row.phase, row.batch_size, row.prompt_len) == ("prefill", 8, 512)]
    return row, next(item for item in run.document.evidence if item.key == row.key)


def test_no_product_beats_its_ceiling() -> None:
    """A trace of an H200 has all 224 products of prefill 8 x 512 in 74.0 ms; squares gave 671 TFLOP/s, 703 at the end.

    The products need 57.2 TFLOP, so they ran at 772 TFLOP/s, and cannot need 85 ms.
    """
    row, _ = prefill_8_x_512("mistral-7b-h200-default")
    assert 74.0e-3 < row.compute_s < 76e-3
    document = read_run(REFERENCE / "mistral-7b-h200-default").document
    assert document.ceilings.full_clock["bfloat16"] == pytest.approx(772e12, rel=2e-3)
    [raised] = [text for text in document.warnings if "too low" in text]
    assert "682 TFLOP/s was too low, and is raised to 773 TFLOP/s, the rate of 224 products" in raised
    ends = re.search(r"\((\d+) TFLOP/s to (\d+) TFLOP/s under load\)", " ".join(document.answer))
    assert ends is not None
    assert int(ends[1]) < 671 < 703 < int(ends[2])


def test_fusing_saves_at_most_what_a_trace_leaves() -> None:
    """Of 110.8 ms, products take 74.0 and attention about 2; fused, the rest moves 22.5 GB, 5.1 ms at 4.39 TB/s."""
    _, evidence = prefill_8_x_512("mistral-7b-h200-default")
    fusing = lever_of(evidence, ChangeId.COMPILED_FORWARD)
    assert fusing.at_most
    assert 110.8e-3 - 74.0e-3 - 2e-3 - 5.1e-3 < fusing.saves_s < 32e-3


def test_the_host_of_a_step_has_one_figure_with_its_range() -> None:
    """The twin of an H200's host took 18.5 ms at its fastest, and steps of the cell 20.4 ms or more in its best visit.

    A measurement of 30 ms in a disturbed minute, and the 15.4 ms in which the GPU idles, are no second figure.
    """
    document = read_run(REFERENCE / "mistral-7b-h200-default").document
    assert "the host needs 18.5 ms to 20.4 ms" in document.answer[0]
    of_step = [*document.answer[:1], *document.warnings]
    of_host = [text for text in of_step if "host" in text or "dispatch" in text]
    assert not re.search(r"\b(30\.1|19\.9|15\.4) ms", " ".join(of_host))


def test_a_compiled_step_takes_at_most_its_graph() -> None:
    """The same run replayed the step of its own kernels as a graph, in 7.41 ms."""
    run = read_run(REFERENCE / "mistral-7b-h200-engines")
    [eager] = [row for row in run.measured if (row.phase, row.engine) == ("decode", "eager")]
    [compiled] = [lever_of(item, ChangeId.COMPILED_STEP) for item in run.document.evidence if item.key == eager.key]
    assert compiled.at_least_s is not None
    assert eager.latency_s - compiled.at_least_s == pytest.approx(7.41e-3, rel=2e-3)


def test_a_full_window_has_a_change_with_its_bound() -> None:
    """Beyond a window of 4096 tokens, 16 sequences copy it in 26.2 ms and repeat its heads in 36.3, of 77.3 ms.

    The host takes 18 to 22 ms for a step, so a step cannot save all 62.
    """
    answer = " ".join(read_run(REFERENCE / "mistral-7b-h200-window").answer)
    found = re.search(
        r"Not tried: model\.config\.sliding_window = None\. .* of 16 x 4096 it would save at most ([\d.]+) ms",
        answer,
    )
    assert found is not None
    assert 77.3 - 22 < float(found[1]) < 62.5
    assert "26.2 ms copy windows, 36.3 ms repeat heads" in answer


def test_a_peak_with_foreign_tensors_says_so() -> None:
    """14.48 GB of weights were loaded, and the allocator held 18.97 in every cell; other runs are within a tenth."""
    texts = {
        folder.name: [text for text in read_run(folder).document.warnings if "foreign tensors" in text]
        for folder in FOLDERS
    }
    said = {name: text for name, found in texts.items() for text in found}
    assert said == {
        "mistral-7b-h100-engines": "a peak of 19.0 GB held 4.44 GB of foreign tensors: a step needs 14.5 GB."
    }


def test_counters_whose_samples_are_old_give_no_warning() -> None:
    """NVML's counters of an H200 in bfloat16, without idle ends: within the tolerance, whatever came before a loop."""
    runs = [read_run(REFERENCE / f"mistral-7b-h200-{name}") for name in ("default", "engines", "window")]
    ratios = [
        signal.value
        for run in runs
        for item in run.document.evidence
        for signal in item.signals
        if signal.signal.startswith("memory traffic by the GPU's counters")
    ]
    assert len(ratios) == 6
    assert all(1 - TRAFFIC_TOLERANCE < ratio < 1 + TRAFFIC_TOLERANCE for ratio in ratios)
    assert not any("counters saw" in text for run in runs for text in run.document.warnings)


def test_memory_beyond_a_window_is_that_of_a_real_gpu() -> None:
    """One layer's keys and values are repeated for 32 heads: 1.07 of 24.18 GB at batch 16."""
    run = read_run(REFERENCE / "mistral-7b-h200-window")
    peaks = {row.batch_size: row.peak_memory_bytes for row in run.measured}
    for item in run.document.evidence:
        assert item.predicted_peak_memory_bytes == pytest.approx(peaks[item.batch_size], rel=3e-3)


def test_rolled_windows_take_the_time_that_a_trace_saw() -> None:
    """Concatenating took 26.2 of 77 ms at 16 x 4096 on an H200, 6.7 times what its bytes need at the roof."""
    run = read_run(REFERENCE / "mistral-7b-h200-window")
    row = next(row for row in run.measured if row.batch_size == 16)
    assert row.avoidable_s == pytest.approx(26.2e-3, rel=0.01)
    # The trace, the replays and the roofs are measured apart, and add up to the step.
    assert abs(row.unexplained_s) < 0.03 * row.latency_s


def test_a_step_of_compiled_kernels_is_explained_by_its_trace() -> None:
    """inductor's kernels run for 4.815 of 4.82 ms; weights need 3.24 at the roof, and the kernels lose the rest."""
    run = read_run(REFERENCE / "mistral-7b-h200-compile")
    row = next(row for row in run.measured if row.phase == "decode")
    assert row.kernel_s == pytest.approx(4.815e-3 - 3.25e-3, rel=0.03)
    assert abs(row.unexplained_s) < 0.01 * row.latency_s
