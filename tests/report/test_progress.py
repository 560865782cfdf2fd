"""Progress of a run: one line per stage and one per half minute, or none if quiet."""

from __future__ import annotations

import pytest

from profiler.grid.cells import Cell
from profiler.measure.rounds import Progress
from profiler.report.progress import LineListener


def test_a_line_per_stage_and_one_per_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    listener = LineListener()
    listener.stage("timing")
    for visit, elapsed_s, left_s in ((1, 0, 60), (1, 29, 31), (1, 45, 15), (2, 70, 5), (2, 90, 1)):
        listener.progress(Progress(Cell(1, 64, 8), visit, elapsed_s, left_s), 4)
    assert capsys.readouterr().err.splitlines() == [
        "timing",
        "batch 1 x 64, visit 1, about 1:00 left",
        "batch 1 x 64, visit 1, about 0:15 left",
        "batch 1 x 64, visit 2, about 0:01 left",
    ]
