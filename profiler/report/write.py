"""Write report.html of a run."""

from __future__ import annotations

from profiler.report.html import html_page
from profiler.report.sections import run_sections
from profiler.store.folder import Run
from profiler.store.writer import replace_file
from profiler.units import utc_minute


def write_report(run: Run) -> None:
    replace_file(run.folder / "report.html", html_report(run))


def html_report(run: Run) -> str:
    """Return the report of a run as one HTML document."""
    document = run.document
    unfinished = " · interrupted" if not document.finished else ""
    subtitle = f"{run.model.precision} · {utc_minute(document.created)} · roofscope {document.roofscope}{unfinished}"
    return html_page(f"{run.model.id} on {document.device.name}", subtitle, run_sections(run))
