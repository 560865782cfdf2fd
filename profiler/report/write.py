"""Write report.html, report.md and the charts of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from profiler.effort import STANDARD
from profiler.report.html import html_comparison, html_report
from profiler.report.markdown import markdown_report
from profiler.report.plots import save
from profiler.report.sections import waterfalls
from profiler.store.folder import Run
from profiler.store.writer import replace_file

Guard = Callable[[str], AbstractContextManager[None]]
"""Returns the context in which a named file is written; the context may tolerate failures."""


def _unguarded(_name: str) -> AbstractContextManager[None]:
    return nullcontext()


def write_reports(runs: Sequence[Run], guard: Guard = _unguarded, pictures: Sequence[str] = STANDARD.pictures) -> None:
    """Write report.html and report.md into each run's folder, and the pictures where a cell has a number."""
    for run in runs:
        drawn = pictures if run.document.evidence else pictures[:1]
        of_engines = ("engines",) if waterfalls(run) else ()
        for name in (*drawn, *of_engines) if run.measured else ():
            with guard(f"{name}.png"):
                save([run], name, run.folder / f"{name}.png")
        write_pages(run, guard, draw="roofline" in pictures)


def write_pages(run: Run, guard: Guard = _unguarded, *, draw: bool = True) -> None:
    """Write report.html and report.md into a run's folder; without the roofline in the page unless `draw`."""
    with guard("report.html"):
        replace_file(run.folder / "report.html", html_report(run, draw=draw))
    with guard("report.md"):
        replace_file(run.folder / "report.md", markdown_report(run))


def write_comparison(runs: Sequence[Run], folder: Path) -> None:
    """Write report.html into a folder, for several runs of one model, and precisions.png where all have a number."""
    if all(run.measured for run in runs):
        save(runs, "precisions", folder / "precisions.png")
    replace_file(folder / "report.html", html_comparison(runs, folder))
