"""Print a comparison, a history or a gate on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from profiler.comparison.compare import Comparison, History
from profiler.comparison.gate import Gate
from profiler.comparison.gate_formats import GATE_COLUMNS, gate_line, gate_rows
from profiler.comparison.text import (
    CHANGE_COLUMNS,
    change_rows,
    column_words,
    comparison_sentences,
    difference_lines,
    history_rows,
    history_sentences,
    machine_sentences,
    selected_history,
)
from profiler.report.console import MOST_ROWS, long_table


def print_changes(comparison: Comparison, console: Console) -> None:
    """Print the comparison of two runs: the answer, the settings that differ, and a table of cells."""
    console.print()
    for sentence in comparison_sentences(comparison):
        console.print(Text(sentence, style="bold"))
    console.print()
    print_differences(comparison, console)
    console.print(Text(column_words(comparison), style="dim"))
    console.print(long_table(CHANGE_COLUMNS, change_rows(comparison, MOST_ROWS), of=len(comparison.changes)))
    _print_sides(comparison, console)


def _print_sides(comparison: Comparison, console: Console) -> None:
    for word, side in (("before", comparison.before), ("after", comparison.after)):
        console.print(Text(f"{word}: {side.name} ({side.created or side.tool})", style="dim"))


def print_differences(comparison: Comparison, console: Console) -> None:
    """Print the settings that differ between the sides, one per line."""
    for line in difference_lines(comparison):
        console.print(Text(line))


def print_history(history: History, console: Console) -> None:
    """Print several runs, oldest first, one column each."""
    console.print()
    for sentence in history_sentences(history):
        console.print(Text(sentence, style="bold"))
    console.print()
    runs = selected_history(history)
    console.print(long_table(("cell", *(f"run {number}" for number in runs)), history_rows(history, runs)))
    for number in runs:
        side = history.sides[number]
        console.print(Text(f"run {number}: {side.name} ({side.created or side.tool})", style="dim"))
    if omitted := len(history.sides) - len(runs):
        console.print(Text(f"{omitted} more runs, at which fewer cells changed or none: --format json has them all"))


def print_gate(gate: Gate, console: Console) -> None:
    """Print a gate: its outcome in one line, the settings that differ, and a table of cells."""
    console.print(Text(gate_line(gate), style="bold"))
    for sentence in machine_sentences(gate.comparison):
        console.print(Text(sentence))
    print_differences(gate.comparison, console)
    if gate.cells:
        console.print(long_table(GATE_COLUMNS, gate_rows(gate)))
    _print_sides(gate.comparison, console)
