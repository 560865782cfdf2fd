"""Warnings about cells without a number, and about cells that failed after an earlier visit."""

from __future__ import annotations

from dataclasses import replace

from made_facts import CELL, facts

from profiler.facts.visits import Gap, Visit
from profiler.grid.cells import Cell
from profiler.judge.warnings import run_warnings

OTHER = Cell(2, 64, 8)
VISIT = Visit(CELL, 0, 0.1, (0.1,) * 7, 1.0, (), None, 0.0)


def test_each_kind_of_reason_is_said_once() -> None:
    """Two cells lack memory, which differs only in its figures, and one lacks time."""
    cells = [Cell(batch, 64, 8) for batch in (8, 16, 32)]
    reasons = ["needs 4.1 GB, free are 3.0 GB", "needs 8.2 GB, free are 3.0 GB", "--budget ended first"]
    known = replace(
        facts([], flops_per_s=1.0, bytes_per_s=1.0),
        gaps={cell: Gap(cell, "skipped", reason) for cell, reason in zip(cells, reasons, strict=True)},
    )
    assert run_warnings(known, []) == [
        "1 cell has no number (first: batch 32 x 64, skipped: --budget ended first).",
        "2 cells have no number (first: batch 8 x 64, skipped: needs 4.1 GB, free are 3.0 GB).",
    ]


def test_a_cell_that_was_measured_before_it_failed_has_a_number() -> None:
    known = replace(
        facts([], flops_per_s=1.0, bytes_per_s=1.0),
        visits={OTHER: [replace(VISIT, cell=OTHER)]},
        gaps={cell: Gap(cell, "oom", "out of memory") for cell in (CELL, OTHER)},
    )
    assert run_warnings(known, []) == [
        "1 cell has no number (first: batch 1 x 64, oom: out of memory).",
        "1 cell failed in a later visit and keeps its number (first: batch 2 x 64, oom: out of memory).",
    ]
