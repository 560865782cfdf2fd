"""The runs under runs/reference, of several machines and precisions, judged by the current rules."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import pytest

from profiler.errors import RunError
from profiler.facts.dispatch import Dispatch
from profiler.judge.breakdown import TERMS, StepRoofs, TimeBreakdown
from profiler.judge.cells import CellResult
from profiler.judge.judge_run import judge_run
from profiler.judge.regimes import Measurement, Regime, judge_cell
from profiler.store.folder import Run, read_document, read_facts, read_gathered, read_run

FOLDERS = sorted(
    file.parent for file in (Path(__file__).parents[2] / "runs" / "reference").rglob("cells.csv") if file.is_file()
)
EXPERT = {row["run"]: row for row in csv.DictReader(Path(__file__).with_name("expert.csv").read_text().splitlines())}
"""The labels by phase that an expert on these machines would agree with, and the reason."""


def labels(folder: Path) -> list[tuple[CellResult, Regime]]:
    """Return every measured cell with its label by the current rules, from its facts or else from its terms."""
    run = read_run(folder)
    try:
        document = read_document(folder)
        found = judge_run(read_facts(folder, document, read_gathered(folder, document)))
        regimes = {cell.key: cell.verdict.regime for cell in found.judged}
        return [(result, regimes[result.key]) for result in run.measured]
    except RunError:  # the run has no facts
        return [(result, _of_terms(run, result)) for result in run.measured]


def _of_terms(run: Run, result: CellResult) -> Regime:
    terms = {name: getattr(result, name) for name in TERMS}
    device_s = result.weights_s + result.kv_s + result.compute_s
    parts = TimeBreakdown(
        latency_s=result.latency_s, **terms, device_s=device_s, floor_s=result.floor_s, replayed_share=1.0
    )
    ceilings = run.document.ceilings.ceilings
    roofs = StepRoofs(
        ceilings.memory_bytes_per_s, Dispatch(result.dispatch_s, 0.0), run.document.device.overlaps_dispatch
    )
    flops_per_s = ceilings.compute_flops_per_s(run.model.dtype)
    ends_s = (result.latency_low_s, result.latency_high_s)
    return judge_cell(Measurement(parts, result.model_flops, result.model_bytes, flops_per_s, roofs, *ends_s)).regime


def _explained(results: Iterable[tuple[CellResult, Regime]]) -> list[tuple[CellResult, Regime]]:
    return [(result, regime) for result, regime in results if abs(result.unexplained_s) <= 0.20 * result.latency_s]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_explained_cell_is_never_inconclusive(folder: Path) -> None:
    found = labels(folder)
    assert found
    unclear = [result.key.name for result, regime in _explained(found) if regime == "inconclusive"]
    assert not unclear


@pytest.mark.parametrize("folder", [item for item in FOLDERS if item.name in EXPERT], ids=lambda folder: folder.name)
def test_labels_are_those_of_an_expert(folder: Path) -> None:
    explained = _explained(labels(folder))
    assert len(explained) > 5
    expert = EXPERT[folder.name]
    wrong = {result.key.name: regime for result, regime in explained if regime not in expert[result.phase].split("|")}
    # One cell in ten may be close to another label.
    assert len(wrong) <= len(explained) / 10, wrong
