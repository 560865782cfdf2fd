"""How a run goes: a line a stage, one a round and one a half minute, or nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from profiler.grid.cells import Cell
from profiler.report.progress import LineListener, QuietListener, make_listener


@dataclass(frozen=True)
class At:
    """As the sweep's own `Progress`."""

    cell: Cell
    round: int
    elapsed_s: float = 0.0
    left_s: float = 95.0
    visits: int = 0


def test_a_line_a_stage_one_a_round_and_one_a_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    """What unseen cells will take is an estimate; the rounds behind the first end with the budget."""
    listener = LineListener()
    listener.stage("timing")
    for number, elapsed_s, left_s in ((0, 0, 60), (0, 29, 70), (0, 45, 80), (0, 70, 50), (1, 90, 20), (1, 100, 10)):
        listener.progress(At(Cell(1, 64, 8), number, elapsed_s, left_s), 4)  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines() == [
        "timing",
        "round 1 of 4 cells, about 1:00 of timing left",
        "round 1 of 4 cells, about 1:20 of timing left",
        "round 2 of 4 cells, at most 0:20 of timing left",
    ]


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with make_listener(quiet=True) as listener:
        assert type(listener) is QuietListener
        listener.stage("timing")
        listener.progress(At(Cell(1, 64, 8), 0), 4)  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""
