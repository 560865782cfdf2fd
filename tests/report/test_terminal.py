"""The first screen: the answer, the table, a bar a cell; 100 columns, and plain ASCII where that is asked for."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from profiler.diagnosis.step_time import TERM_NAMES, TERMS
from profiler.record.run import Run, read_run
from profiler.report.console import screen
from profiler.report.terminal import BAR_LEGEND, print_run, split_bars

RUN = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-2-cores"


@pytest.fixture
def run() -> Run:
    return read_run(RUN)


def test_the_answer_comes_first_and_all_fits_a_hundred_columns(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    print_run(run, screen())
    lines = capsys.readouterr().out.splitlines()
    first = next(line for line in lines if line)
    assert first.startswith(run.answer[0][:40])
    assert max(len(line) for line in lines) <= 100
    assert "\x1b" not in "".join(lines), "a pipe gets no colours"


def test_plain_is_ascii(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    print_run(run, screen(plain=True))
    assert capsys.readouterr().out.isascii()


def test_colours_never_carry_meaning_alone(run: Run) -> None:
    """With colours stripped the bars still tell their terms: a letter each."""
    coloured, bare = io.StringIO(), io.StringIO()
    print_run(run, Console(file=coloured, force_terminal=True, color_system="truecolor", width=100))
    print_run(run, Console(file=bare, force_terminal=True, color_system="truecolor", width=100, no_color=True))
    assert "\x1b[34m" in coloured.getvalue()
    assert "\x1b[34m" not in bare.getvalue()
    for name, bar, _note in split_bars(run):
        assert f"{name:<20} {bar.plain}" in bare.getvalue()
    assert all(name in BAR_LEGEND for name in TERM_NAMES.values())


def test_a_bar_has_the_shares_of_its_cell(run: Run) -> None:
    """Half weights, a quarter dispatch, a quarter arithmetic; a negative residual stands beside the bar."""
    cells = run.cells.head(1).copy()
    for term in TERMS:
        cells[term] = 0.0
    cells["latency_s"] = 1.0
    cells["weights_s"], cells["dispatch_s"], cells["compute_s"] = 0.5, 0.25, 0.25
    [(_, bar, note)] = split_bars(replace(run, cells=cells))
    assert (bar.plain.count("w"), bar.plain.count("a"), bar.plain.count("d"), len(bar.plain)) == (24, 12, 12, 48)
    assert note == ""
    cells["unexplained_s"] = -0.08
    [(_, _, note)] = split_bars(replace(run, cells=cells))
    assert note == "unexplained -8 %"


def test_many_cells_get_bars_that_span_them(run: Run) -> None:
    bars = split_bars(run)
    assert len(run.cells) == 32
    assert len(bars) == 16
    assert [bars[index][0] for index in (0, 7, 8, 15)] == [
        "prefill 1 x 64",
        "prefill 8 x 512",
        "decode 1 x 64",
        "decode 8 x 512",
    ]
