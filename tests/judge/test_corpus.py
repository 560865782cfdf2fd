"""The labels of the runs under runs/reference, of several machines and precisions."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from profiler.judge.cells import CellResult
from profiler.store.folder import read_run

REFERENCE = Path(__file__).parents[2] / "runs" / "reference"
FOLDERS = sorted(file.parent for file in REFERENCE.rglob("operators.csv"))
"""Runs with facts, whose cells are judged by today's rules (test_committed_runs.py)."""
EXPERT = {row["run"]: row for row in csv.DictReader(Path(__file__).with_name("expert.csv").read_text().splitlines())}
"""The labels by phase that an expert on these machines would agree with, and the reason."""


def explained(folder: Path) -> list[CellResult]:
    return [row for row in read_run(folder).measured if abs(row.unexplained_s) <= 0.20 * row.latency_s]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_explained_cell_is_never_inconclusive(folder: Path) -> None:
    assert not [row.key.name for row in explained(folder) if row.regime == "inconclusive"]


@pytest.mark.parametrize("folder", [item for item in FOLDERS if item.name in EXPERT], ids=lambda folder: folder.name)
def test_labels_are_those_of_an_expert(folder: Path) -> None:
    rows, expert = explained(folder), EXPERT[folder.name]
    assert len(rows) > 5
    wrong = {row.key.name: row.regime for row in rows if row.regime not in expert[row.phase].split("|")}
    # One cell in ten may be close to another label.
    assert len(wrong) <= len(rows) / 10, wrong
