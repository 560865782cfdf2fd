"""The HTML page that compares two runs, with its pictures."""

from __future__ import annotations

from pathlib import Path

from profiler.comparison import waterfall  # noqa: F401 - it adds its picture
from profiler.comparison.compare import compare_sides
from profiler.comparison.side import side_of_run
from profiler.comparison.text import CHANGE_COLUMNS, change_rows, column_words, comparison_sentences, difference_lines
from profiler.report.html import link_from, templates
from profiler.report.svg import inline_svg
from profiler.store.folder import Run
from profiler.store.writer import replace_file

CHANGES_FILE = "changes.html"

_WATERFALL = "From the time before to the time after, term by term"
_ROOFLINES = "Both runs under their own measured roofs"
_SPLITS = "Where the time of every cell goes"


def write_changes(before: Run, after: Run) -> Path:
    """Write changes.html into the folder of `after`, and return its path."""
    path = after.folder / CHANGES_FILE
    replace_file(path, html_changes(before, after, after.folder))
    return path


def html_changes(before: Run, after: Run, folder: Path) -> str:
    """The comparison of two runs as one HTML document, with links relative to `folder` to the report of each."""
    comparison = compare_sides(side_of_run(before), side_of_run(after))
    runs = [before, after]
    drawable = all(run.measured for run in runs)
    # Only sides of one model have terms that can gain time.
    has_gains = comparison.comparable and any(change.terms for change in comparison.changes)
    return (
        templates()
        .get_template("changes.html.j2")
        .render(
            first=before,
            runs=[(word, run, link_from(run, folder)) for word, run in zip(("before", "after"), runs, strict=True)],
            answer=comparison_sentences(comparison),
            differences=difference_lines(comparison),
            waterfall=inline_svg(runs, "waterfall", _WATERFALL) if drawable and has_gains else None,
            splits=[inline_svg([run], "split", _SPLITS) for run in runs] if drawable else [],
            rooflines=inline_svg(runs, "devices", _ROOFLINES) if drawable else None,
            column_words=column_words(comparison),
            columns=CHANGE_COLUMNS,
            rows=change_rows(comparison),
        )
    )
