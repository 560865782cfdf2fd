"""Several precisions on the screen: what each saves, and the cells that tell most against the first."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from profiler.diagnosis.precisions import sentences
from profiler.record.run import Run
from profiler.report.comparison import (
    AGAINST_COLUMNS,
    PRECISION_COLUMNS,
    against_rows,
    once_line,
    precision_rows,
    telling_rows,
)
from profiler.report.lines import quality_line

_WORDS = ("cell", "precision", "regime")


def print_comparison(runs: Sequence[Run], console: Console) -> None:
    """Print runs of one model in several precisions, each against the first."""
    console.print()
    for sentence in sentences(runs):
        console.print(Text(sentence, style="bold"))
    console.print()
    console.print(Text(f"{runs[0].model.id} on {runs[0].document.device.name}"))
    console.print(_table(PRECISION_COLUMNS, precision_rows(runs)))
    shown, every = telling_rows(runs), against_rows(runs)
    console.print()
    console.print(_table(AGAINST_COLUMNS, shown))
    if len(shown) < len(every):
        console.print(
            Text(f"the fastest and the slowest of each; all {len(every)}: {runs[0].folder.parent / 'report.html'}")
        )
    if once := once_line(runs):
        console.print(Text(once))
    for run in runs:
        if quality := quality_line(run):
            console.print(Text(f"{run.model.quant} {quality}"))
    for warning in _warnings(runs):
        console.print(Text(f"! {warning}", style="yellow"))
    for run in runs:
        console.print(Text(f"run: {run.folder}", style="dim"))


def _warnings(runs: Sequence[Run]) -> list[str]:
    """Each run's warnings with whose they are; what several say alike, once."""
    whose: dict[str, list[str]] = {}
    for run in runs:
        for warning in run.document.warnings:
            whose.setdefault(warning, []).append(run.model.quant)
    return [f"{', '.join(dict.fromkeys(names))}: {warning}" for warning, names in whose.items()]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
