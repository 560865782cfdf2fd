"""The files beside a run's numbers: report.html, report.md and the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from profiler.record.run import Run
from profiler.record.store import replace_file
from profiler.report.html import html_comparison, html_report
from profiler.report.lines import waterfalls
from profiler.report.markdown import markdown_report
from profiler.report.plots import save

_PICTURES = ("roofline", "map", "split")


def write_reports(runs: Sequence[Run]) -> None:
    """Write report.html and report.md into each run's folder, and the pictures where a cell has a number."""
    for run in runs:
        if run.measured:
            of_engines = ("engines",) if waterfalls(run) else ()
            judged = _PICTURES if run.document.evidence else _PICTURES[:1]
            for name in (*judged, *of_engines):
                save([run], name, run.folder / f"{name}.png")
        replace_file(run.folder / "report.html", html_report(run))
        replace_file(run.folder / "report.md", markdown_report(run))


def write_comparison(runs: Sequence[Run], folder: Path) -> None:
    """Write report.html into a folder, for several runs of one model, and precisions.png where all have a number."""
    if all(run.measured for run in runs):
        save(runs, "precisions", folder / "precisions.png")
    replace_file(folder / "report.html", html_comparison(runs, folder))
