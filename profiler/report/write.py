"""Write report.html and report.md of a run; its sections as Markdown, to paste into an issue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import singledispatch

from profiler.report.blocks import (
    Block,
    BreakdownChart,
    CellsTable,
    Lines,
    Picture,
    Sentences,
    ShellCommand,
    TextTable,
    visible_sections,
)
from profiler.report.columns import columns_with_values
from profiler.report.html import html_page
from profiler.report.sections import run_sections
from profiler.report.time_breakdown import MOST_BARS_A_PHASE, breakdown_bars, shares_table
from profiler.store.folder import Run
from profiler.store.writer import replace_file
from profiler.units import markdown_text, utc_minute

Guard = Callable[[str], AbstractContextManager[object]]
"""Returns the context in which a named file is written; the context may tolerate failures."""


def write_reports(runs: Sequence[Run], guard: Guard = nullcontext) -> None:
    """Write report.html and report.md into each run's folder."""
    for run in runs:
        with guard("report.html"):
            replace_file(run.folder / "report.html", html_report(run))
        with guard("report.md"):
            replace_file(run.folder / "report.md", markdown_report(run))


def html_report(run: Run) -> str:
    """Return the report of a run as one HTML document."""
    document = run.document
    unfinished = " · interrupted" if not document.finished else ""
    subtitle = f"{run.model.precision} · {utc_minute(document.created)} · roofscope {document.roofscope}{unfinished}"
    return html_page(f"{run.model.id} on {document.device.name}", subtitle, run_sections(run))


def markdown_report(run: Run) -> str:
    """Return the report of a run as Markdown, which names the commands that draw its pictures."""
    lines = [f"# {markdown_text(f'{run.model.id} on {run.document.device.name}')}", ""]
    for section in visible_sections(run_sections(run), "markdown"):
        if section.title:
            lines += [f"## {markdown_text(section.title)}", ""]
        if section.note:
            lines += [f"*{markdown_text(section.note)}*", ""]
        for block in section.blocks:
            lines += [*_render_block(block), ""]
    return "\n".join(lines)


@singledispatch
def _render_block(block: Block) -> list[str]:
    raise TypeError(f"Markdown renders no {type(block).__name__}")


@_render_block.register
def _(block: Sentences) -> list[str]:
    return [markdown_text(sentence) for sentence in block.sentences]


@_render_block.register
def _(block: Lines) -> list[str]:
    lines = [markdown_text(line) for line in block.lines]
    return "\n\n".join(lines).split("\n") if block.style == "paragraph" else [f"- {line}" for line in lines]


@_render_block.register
def _(block: TextTable) -> list[str]:
    caption = [markdown_text(block.caption), ""] if block.caption else []
    return [*caption, *_table([(column.heading, column.number) for column in block.columns], block.rows)]


def _table(columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table; `columns` has each heading, and whether its column has numbers."""
    lines = [[heading for heading, _ in columns], ["---:" if number else "---" for _, number in columns], *rows]
    return [f"| {' | '.join(map(markdown_text, line))} |" for line in lines]


@_render_block.register
def _(block: Picture) -> list[str]:
    return [f"{markdown_text(block.alt)}: `roofscope plot . {block.name}`"]


@_render_block.register
def _(block: CellsTable) -> list[str]:
    columns, results = columns_with_values(block.run, "markdown"), block.run.results
    headings = [(column.heading, any(column.entry(result).number for result in results)) for column in columns]
    return _table(headings, [[column.entry(result).text for column in columns] for result in results])


@_render_block.register
def _(block: BreakdownChart) -> list[str]:
    return _render_block(shares_table(breakdown_bars(block.run.measured, MOST_BARS_A_PHASE)))


@_render_block.register
def _(block: ShellCommand) -> list[str]:
    """A backtick in the command would end the code."""
    command = block.command.replace("`", "'")
    return [f"{block.label}: `{command}`"]
