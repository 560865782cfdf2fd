"""The first screen: the answer, the table, a bar per cell, to scale; 100 columns, and plain ASCII on request."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from made_runs import key, old_run, result, whole_run
from rich.console import Console

from profiler.grid.cells import Cell
from profiler.measure.rounds import Progress
from profiler.report.blocks import Lines, Section, text_table
from profiler.report.progress import LineListener
from profiler.report.sections import SECTIONS, run_sections
from profiler.report.terminal import print_sections
from profiler.report.time_breakdown import bar_text, breakdown_bars
from profiler.report.write import html_report, markdown_report
from profiler.store.folder import Run


def lines_of(sections: Sequence[Section | None], width: int = 100, most_lines: int | None = None) -> list[str]:
    stream = io.StringIO()
    print_sections(sections, Console(file=stream, width=width, markup=False, emoji=False), most_lines)
    return stream.getvalue().splitlines()


def test_a_bar_has_the_shares_of_its_cell() -> None:
    """Half weights, a quarter dispatch, a quarter arithmetic; negative terms take no space."""
    cell = result(key(), 1.0, weights_s=0.5, dispatch_s=0.25, compute_s=0.25)
    [bar] = breakdown_bars([cell], 8)
    text = bar_text(bar)
    widths = [(span.style, span.end - span.start) for span in text.spans]
    assert widths == [("blue", 24), ("yellow", 12), ("magenta", 12)]
    [bar] = breakdown_bars([replace(cell, unexplained_s=-0.08)], 8)
    assert bar_text(bar) == text


@pytest.mark.parametrize(("width", "left_out"), [(100, []), (90, ["TFLOP/s"]), (80, ["TFLOP/s", "GB/s", "tok/s"])])
def test_a_narrow_screen_has_fewer_columns_and_cuts_none(width: int, left_out: list[str]) -> None:
    """Columns that others imply are omitted first; digits and units are never cut."""
    run = whole_run()
    lines = lines_of(run_sections(run), width)
    assert next(filter(None, lines)).startswith(run.answer[0][:40]), "the answer comes first"
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= width
    [heads] = [line.split() for line in lines if line.startswith("phase")]
    assert [name for name in ("TFLOP/s", "GB/s", "tok/s") if name not in heads] == left_out
    assert {"batch", "tokens", "time", "±", "roof", "regime", "sure"} <= set(heads)


def test_a_ranked_table_keeps_its_first_rows_and_another_one_spans_all() -> None:
    """Of 100 rows a screen of 45 lines has the first, or evenly picked ones from the first to the last."""
    rows = [[f"row {number}", "1"] for number in range(100)]
    for ranked in (True, False):
        lines = lines_of([Section("", [text_table(("name", "value"), rows, ranked=ranked)])], 80, most_lines=45)
        shown = [line.split("  ")[0] for line in lines if line.startswith("row ")]
        assert shown[0] == "row 0"
        assert shown[-1] == (f"row {len(shown) - 1}" if ranked else "row 99")
        assert f"{len(shown)} of 100 rows" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", [60, 61, 62, 70, 80, 100])
def test_no_word_of_a_table_is_torn(width: int) -> None:
    """A text and a first column break between words, and a number of 30 characters never."""
    row = ("decode 16 x 4096, threads 8", f"{10**29}", "arithmetic +178 ms where others kept 0.9 cores busy")
    table = text_table(("cell", "change", "reason"), [row], wrapped=("reason",))
    lines = lines_of([Section("", [table])], width)
    assert max(map(len, lines)) <= width
    assert {*" ".join(row).split()} <= {*" ".join(lines).split()}


def test_negative_terms_are_left_of_zero() -> None:
    cell = result(key(), 1.0, weights_s=1.1, kernel_s=-0.02, unexplained_s=-0.08)
    [bar] = breakdown_bars([cell], 8)
    spans = {item.term: (item.start, item.end) for item in bar.segments}
    assert spans["weights_s"] == (0.0, pytest.approx(1.1))
    assert spans["kernel_s"] == (pytest.approx(-0.02), pytest.approx(0.0))
    assert spans["unexplained_s"] == (pytest.approx(-0.10), pytest.approx(-0.02))
    assert sum(item.share for item in bar.segments) == pytest.approx(1.0)
    assert bar.below_zero == "unexplained -8 %"
    [tiny] = breakdown_bars([result(key(), 1.0, weights_s=1.005, unexplained_s=-0.005)], 8)
    assert tiny.below_zero == ""


def test_parts_of_more_than_twice_the_time_are_not_drawn() -> None:
    """A cell took 357 ms, but its kernels took 3.8 s when they were measured later, while other work ran."""
    cell = result(key(), 0.357, kernel_s=3.8, unexplained_s=0.357 - 3.8)
    assert breakdown_bars([cell], 8) == []


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


def toy(run: Run) -> Section:
    table = text_table(("dish", "price"), [["<soup>", "3.50"]], caption="of today")
    return Section("A toy section", [Lines([f"cooked for {run.model.id}"]), table], "made up")


def test_a_new_section_is_one_function_that_every_report_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.report.sections.SECTIONS", [*SECTIONS, toy])
    run = old_run()
    page, markdown = html_report(run), markdown_report(run)
    for text in ("\n".join(lines_of(run_sections(run))), page, markdown):
        assert f"cooked for {run.model.id}" in text
        assert "of today" in text
    assert "A toy section" in page
    assert "## A toy section" in markdown
