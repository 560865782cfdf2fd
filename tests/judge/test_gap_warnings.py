"""Warnings about cells without a number, and about cells that failed after an earlier repetition."""

from __future__ import annotations

from dataclasses import replace

from made_facts import CELL, facts

from profiler.facts.repetitions import Gap, Repetition
from profiler.grid.cells import Cell
from profiler.judge.warnings import run_warnings

OTHER, SMALL, LARGE = Cell(2, 64, 8), Cell(8, 64, 8), Cell(16, 64, 8)
REPETITION = Repetition(CELL, 0, 0.1, (0.1,) * 7, 1.0, (), None, 0.0)


def test_each_kind_of_reason_is_said_once_and_a_cell_measured_before_it_failed_has_a_number() -> None:
    """The reasons of two cells that need too much memory differ only in their figures."""
    gaps = [Gap(cell, "oom", "out of memory") for cell in (CELL, OTHER)]
    gaps += [Gap(cell, "skipped", f"needs {gb} GB, free are 3.0 GB") for cell, gb in ((SMALL, 4.1), (LARGE, 8.2))]
    known = replace(
        facts([], flops_per_s=1.0, bytes_per_s=1.0),
        repetitions={OTHER: [replace(REPETITION, cell=OTHER)]},
        gaps={gap.cell: gap for gap in gaps},
    )
    assert run_warnings(known, []) == [
        "1 cell has no number (first: batch 1 x 64, oom: out of memory).",
        "2 cells have no number (first: batch 8 x 64, skipped: needs 4.1 GB, free are 3.0 GB).",
        "1 cell failed in a later repetition and keeps its number (first: batch 2 x 64, oom: out of memory).",
    ]
