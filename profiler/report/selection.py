"""Which of a run's cells a table or a chart shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from profiler.grid.cells import PHASES, CellKey, Phase
from profiler.judge.cells import CellEvidence, CellResult
from profiler.store.folder import Run

_Item = TypeVar("_Item")

MOST_ROWS_A_PHASE = 100
"""Of a table in a report: a browser lays out two hundred rows again at once when they are sorted; nobody reads more."""

MOST_SORTED_A_PHASE = 10_000
"""Rows that a page's own sorting looks at: with so many it has two megabytes, and sorts them at once."""

MOST_SIZES = 12
"""Of an axis of a map: so many regimes can be read beside each other in a picture as wide as a page."""


def evidence_of(run: Run) -> dict[CellKey, CellEvidence]:
    """What each judged cell's verdict stands on."""
    return {item.key: item for item in run.document.evidence}


def first_engine(run: Run) -> str:
    """The engine that the others are held against."""
    return run.document.engine.names[0]


def of_first_engine(run: Run) -> list[CellResult]:
    """The measured cells that the run's first engine stepped."""
    return [result for result in run.measured if result.engine == first_engine(run)]


def of_phase(results: Sequence[CellResult], phase: Phase) -> list[CellResult]:
    """The cells of one phase, in their order."""
    return [result for result in results if result.phase == phase]


def selected_cells(run: Run) -> list[CellResult]:
    """The smallest and the largest measured cell of each phase of the first engine."""
    found: list[CellResult] = []
    for phase in reversed(PHASES):
        cells = of_phase(of_first_engine(run), phase)
        ordered = sorted(cells, key=lambda cell: (cell.batch_size, cell.prompt_len, cell.context_len))
        found += ordered if len(ordered) < 2 else [ordered[0], ordered[-1]]
    return found


def spanning(results: Sequence[CellResult], most_a_phase: int) -> list[CellResult]:
    """At most so many cells of each phase, evenly picked from the first to the last."""
    return [result for phase in PHASES for result in evenly(of_phase(results, phase), most_a_phase)]


def evenly(items: Sequence[_Item], most: int) -> list[_Item]:
    """At most so many of some items, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / max(1, most - 1))] for index in range(most)]


def half_width(result: CellResult) -> float:
    """Half of the time's interval as a share of it; NaN for a single sample, whose interval is not known."""
    if result.status == "ok" and (result.samples is None or result.samples < 2):
        return math.nan
    return (result.latency_high_s - result.latency_low_s) / 2 / result.latency_s


def of_all(shown: int, there: int) -> str:
    """How many of an axis' sizes a map shows, where it is not all of them."""
    return f" ({shown} of {there})" if shown < there else ""
