"""What changed, on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from profiler.diagnosis.compare import Comparison, History
from profiler.diagnosis.gate import Gate
from profiler.report.changes import (
    CHANGE_COLUMNS,
    change_rows,
    comparison_sentences,
    difference_lines,
    history_rows,
    history_sentences,
    machine_sentences,
    shown_runs,
)
from profiler.report.gating import GATE_COLUMNS, gate_line, gate_rows

MOST_ROWS = 200
"""A table on the screen shows so many rows, the first."""
_COLORS = {"slower": "red", "faster": "green", "SLOWER": "red", "pass": "green"}


def print_changes(comparison: Comparison, console: Console) -> None:
    """Print two runs held against each other: the answer, what differs, every cell."""
    console.print()
    for sentence in comparison_sentences(comparison):
        console.print(Text(sentence, style="bold"))
    console.print()
    print_differences(comparison, console)
    console.print(table(CHANGE_COLUMNS, change_rows(comparison, MOST_ROWS), of=len(comparison.changes)))
    _print_sides(comparison, console)


def _print_sides(comparison: Comparison, console: Console) -> None:
    for word, side in (("before", comparison.before), ("after", comparison.after)):
        console.print(Text(f"{word}: {side.name} ({side.created or side.tool})", style="dim"))


def print_differences(comparison: Comparison, console: Console) -> None:
    """Print what is not the same on both sides, a line each."""
    for line in difference_lines(comparison):
        console.print(Text(line))


def print_history(history: History, console: Console) -> None:
    """Print several runs, oldest first, a column each."""
    console.print()
    for sentence in history_sentences(history):
        console.print(Text(sentence, style="bold"))
    console.print()
    runs = shown_runs(history)
    console.print(table(("cell", *(f"run {number}" for number in runs)), history_rows(history, runs)))
    for number in runs:
        side = history.sides[number]
        console.print(Text(f"run {number}: {side.name} ({side.created or side.tool})", style="dim"))
    if left := len(history.sides) - len(runs):
        console.print(Text(f"{left} more runs, at which fewer cells changed or none: --format json has them all"))


def print_gate(gate: Gate, console: Console) -> None:
    """Print a gate: its answer in a line, what differs, every cell."""
    console.print(Text(gate_line(gate), style="bold"))
    for sentence in machine_sentences(gate.comparison):
        console.print(Text(sentence))
    print_differences(gate.comparison, console)
    if gate.cells:
        console.print(table(GATE_COLUMNS, gate_rows(gate)))
    _print_sides(gate.comparison, console)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], of: int | None = None) -> Table:
    """A table of some columns, of the first rows where there are many: `rows` may be the first of so many."""
    found = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        words = name in ("cell", "verdict", "what moved", "gate", "what", "by", "regime", "where", "ran with")
        found.add_column(name, justify="left" if words else "right", no_wrap=name not in ("what moved", "ran with"))
    shown = rows[:MOST_ROWS]
    for row in shown:
        found.add_row(*(Text(text, style=_COLORS.get(text, "")) for text in row))
    if left := (of or len(rows)) - len(shown):
        found.caption = f"{left} more rows: --format json has them all"
    return found
