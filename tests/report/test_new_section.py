"""A new section is one function: the terminal, the page and Markdown render it without further edits."""

from __future__ import annotations

import io

import pytest
from made_runs import old_run
from rich.console import Console

from profiler.report.blocks import Lines, Section, text_table
from profiler.report.sections import SECTIONS, run_sections
from profiler.report.terminal import print_sections
from profiler.report.write import html_report, markdown_report
from profiler.store.folder import Run


def toy(run: Run) -> Section:
    table = text_table(("dish", "price"), [["<soup>", "3.50"]], caption="of today")
    return Section("A toy section", [Lines([f"cooked for {run.model.id}"]), table], "made up")


def test_every_report_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.report.sections.SECTIONS", [*SECTIONS, toy])
    run = old_run()
    screen = io.StringIO()
    print_sections(run_sections(run), Console(file=screen, width=100, markup=False))
    page, markdown = html_report(run), markdown_report(run)
    for text in (screen.getvalue(), page, markdown):
        assert f"cooked for {run.model.id}" in text
        assert "of today" in text
    assert "A toy section" in page
    assert "## A toy section" in markdown
