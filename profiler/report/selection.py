"""Choice of the cells that a table or a chart shows."""

import math
from collections.abc import Sequence
from typing import TypeVar

from profiler.grid.cells import PHASES, CellKey, Phase
from profiler.judge.cells import CellEvidence, CellResult
from profiler.judge.engine_differences import GenerateOverhead
from profiler.report.blocks import evenly
from profiler.store.folder import Run

_Record = TypeVar("_Record", CellResult, GenerateOverhead)
MOST_SIZES = 12
"""Sizes on an axis of a map: more regimes in a row cannot be read in a picture as wide as a page."""


def evidence_of(run: Run) -> dict[CellKey, CellEvidence]:
    """Return the evidence of each judged cell's verdict, by cell."""
    return {item.key: item for item in run.document.evidence}


def first_engine(run: Run) -> str:
    """Return the run's first engine, which the others are compared with."""
    return run.document.engine.names[0]


def of_first_engine(run: Run) -> list[CellResult]:
    return [result for result in run.measured if result.engine == first_engine(run)]


def of_phase(results: Sequence[_Record], phase: Phase) -> list[_Record]:
    return [result for result in results if result.phase == phase]


def _size(cell: CellResult) -> tuple[int, int, int]:
    return cell.batch_size, cell.prompt_len, cell.context_len


def selected_cells(run: Run) -> list[CellResult]:
    """Return the smallest and the largest measured cell of each phase of the first engine, decode first."""
    ordered = sorted(of_first_engine(run), key=_size)
    return [cell for phase in reversed(PHASES) for cell in evenly(of_phase(ordered, phase), 2)]


def smallest_known(run: Run) -> CellResult | None:
    """Return the smallest decode step of the first engine whose time is known, or else the smallest such prefill."""
    known = [cell for cell in of_first_engine(run) if cell.noise != "unusable"]
    return min(known, key=lambda cell: (cell.phase, *_size(cell)), default=None)


def cell_words(result: CellResult) -> str:
    """Return `decode, 64 tokens` or `prefill, 8 x 512 tokens`."""
    cell = result.key.cell
    batch = "" if cell.batch_size == 1 else f"{cell.batch_size} x "
    return f"{result.phase}, {batch}{cell.depth} tokens"


def spanning(results: Sequence[_Record], most_a_phase: int) -> list[_Record]:
    """Return at most `most_a_phase` cells of each phase, evenly picked from the first to the last."""
    return [result for phase in PHASES for result in evenly(of_phase(results, phase), most_a_phase)]


def half_width(result: CellResult) -> float:
    """Return half of the 95 % interval of the time as a share of the time; NaN without two repetitions.

    A single repetition does not show how much repetitions of one cell differ, and a forecast has another interval.
    """
    known = result.status == "ok" and result.repetitions != 1 and (result.samples or 0) > 1
    return result.time.half_width if known else math.nan
