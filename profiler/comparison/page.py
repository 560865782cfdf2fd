"""The HTML page that compares two runs, and its waterfall: the time that each term of the time breakdown gained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from profiler.comparison.compare import Change, compare_sides
from profiler.comparison.side import side_of_run
from profiler.comparison.text import changes_table, column_words, comparison_sentences, difference_lines
from profiler.errors import RequestError
from profiler.grid.cells import PHASES
from profiler.report.blocks import Lines, Picture, Section, Sentences
from profiler.report.html import html_page, link_from
from profiler.report.plots import COMPARISONS
from profiler.report.plots.waterfall import PANELS_A_PHASE, Panel, waterfall_figure
from profiler.store.folder import Run
from profiler.store.writer import replace_file
from profiler.units import utc_minute

CHANGES_FILE = "changes.html"

_WATERFALL = "From the time before to the time after, term by term"
_ROOFLINES = "Both runs under their own measured roofs"
_BREAKDOWNS = "Where the time of every cell goes"


def write_changes(before: Run, after: Run) -> Path:
    """Write changes.html into the folder of `after`, and return its path."""
    path = after.folder / CHANGES_FILE
    replace_file(path, html_changes(before, after, after.folder))
    return path


def html_changes(before: Run, after: Run, folder: Path) -> str:
    """Return the comparison of two runs as one HTML document, with links relative to `folder` to the report of each."""
    comparison = compare_sides(side_of_run(before), side_of_run(after))
    runs = (before, after)
    drawable = all(run.measured for run in runs)
    # Only sides of one model have terms that can gain time.
    has_gains = comparison.comparable and any(change.terms for change in comparison.changes)
    sections = [Section("", [Sentences(comparison_sentences(comparison))])]
    for word, run in zip(("Before", "After"), runs, strict=True):
        line = f"{utc_minute(run.document.created)} · {run.model.precision} · roofscope {run.document.roofscope}"
        lines = [Lines([line], "dim")]
        sections.append(Section(f"{word}: {run.folder.name}", lines, link=link_from(run, folder)))
    sections.append(
        Section("What differs", [Lines(difference_lines(comparison))], "what may explain a change comes first")
    )
    if drawable and has_gains:
        note = "the cells that changed most, from before to after by term; measured"
        sections.append(Section("Which terms changed", [Picture("waterfall", _WATERFALL, runs)], note))
    sections.append(Section("Every cell", [changes_table(comparison)], f"measured; {column_words(comparison)}"))
    if drawable:
        breakdowns = [Picture("split", _BREAKDOWNS, (run,)) for run in runs]
        sections.append(Section("Both time breakdowns", breakdowns, "before, then after"))
        note = "measured; both axes logarithmic"
        sections.append(Section("Both under their roofs", [Picture("devices", _ROOFLINES, runs)], note))
    return html_page(f"{before.model.id} on {before.document.device.name}: what changed", "", sections)


def waterfall(runs: Sequence[Run]) -> Figure:
    """Draw the cells of each phase that changed most between the first run and the last, with each term's gain.

    Raises RequestError if the two are not comparable, or have no cell with a time breakdown in common.
    """
    comparison = compare_sides(side_of_run(runs[0]), side_of_run(runs[-1]))
    if not comparison.comparable:
        raise RequestError(f"not comparable: {comparison.refusal}. `devices` draws both under their own roofs.")
    shown: list[Change] = []
    for phase in reversed(PHASES):
        of_phase = [change for change in comparison.changes if change.asked.phase == phase and change.terms]
        shown += sorted(of_phase, key=lambda change: -abs(change.change))[:PANELS_A_PHASE]
    if not shown:
        raise RequestError(f"{runs[0].folder} and {runs[-1].folder} have no cell with a time breakdown in common.")
    panels = [
        Panel(
            f"{change.asked.name}: {change.verdict}",
            ("before", "after"),
            (change.before.median_s, change.after.median_s),
            change.terms,
        )
        for change in shown
    ]
    return waterfall_figure(panels, f"{runs[0].folder.name} to {runs[-1].folder.name}")


COMPARISONS["waterfall"] = waterfall
