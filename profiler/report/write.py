"""Write report.html and report.md of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from profiler.report.blocks import Picture
from profiler.report.html import html_page
from profiler.report.markdown import markdown_page
from profiler.report.sections import run_sections
from profiler.store.folder import Run
from profiler.store.writer import replace_file
from profiler.units import utc_minute

Guard = Callable[[str], AbstractContextManager[object]]
"""Returns the context in which a named file is written; the context may tolerate failures."""


def write_reports(runs: Sequence[Run], guard: Guard = nullcontext, *, draw: bool = True) -> None:
    """Write report.html and report.md into each run's folder; the page has pictures if `draw`."""
    for run in runs:
        with guard("report.html"):
            replace_file(run.folder / "report.html", html_report(run, draw=draw))
        with guard("report.md"):
            replace_file(run.folder / "report.md", markdown_report(run))


def html_report(run: Run, *, draw: bool = True) -> str:
    """Return the report of a run as one HTML document, without pictures unless `draw`."""
    sections = run_sections(run)
    if not draw:
        sections = [
            section and replace(section, blocks=[block for block in section.blocks if not isinstance(block, Picture)])
            for section in sections
        ]
    document = run.document
    unfinished = " · interrupted" if not document.finished else ""
    subtitle = f"{utc_minute(document.created)} · roofscope {document.roofscope}{unfinished}"
    return html_page(f"{run.model.id} on {document.device.name}", subtitle, sections)


def markdown_report(run: Run) -> str:
    """Return the report of a run as Markdown, which names the commands that draw its pictures."""
    return markdown_page(f"{run.model.id} on {run.document.device.name}", run_sections(run))
