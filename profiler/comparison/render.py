"""Print a comparison, a history or a gate on the terminal."""

from __future__ import annotations

from rich.console import Console

from profiler.comparison.compare import Comparison, History
from profiler.comparison.gate import Gate
from profiler.comparison.gate_formats import GATE_CAPTION, GATE_COLUMNS, gate_line, gate_rows
from profiler.comparison.text import (
    changes_table,
    column_words,
    comparison_sentences,
    difference_lines,
    history_rows,
    history_sentences,
    machine_sentences,
    selected_history,
)
from profiler.report.blocks import Lines, Sentences, text_table
from profiler.report.terminal import MOST_ROWS, print_blocks
from profiler.units import utc_minute


def print_changes(comparison: Comparison, console: Console) -> None:
    """Print the comparison of two runs: the answer, the settings that differ, and a table of cells."""
    blocks = [
        Sentences(comparison_sentences(comparison)),
        Lines(difference_lines(comparison)),
        Lines([column_words(comparison)], "dim"),
        changes_table(comparison, MOST_ROWS),
        _sides(comparison),
    ]
    print_blocks(blocks, console)


def _sides(comparison: Comparison) -> Lines:
    sides = (("before", comparison.before), ("after", comparison.after))
    return Lines([f"{word}: {side.name} ({utc_minute(side.created) or side.tool})" for word, side in sides], "dim")


def print_history(history: History, console: Console) -> None:
    """Print several runs, oldest first, one column each."""
    runs = selected_history(history)
    sides = [(number, history.sides[number]) for number in runs]
    omitted = len(history.sides) - len(runs)
    rest = f"{omitted} more runs, at which fewer cells changed or none: --format json has them all"
    blocks = [
        Sentences(history_sentences(history)),
        text_table(("cell", *(f"run {number}" for number in runs)), history_rows(history, runs)),
        Lines(
            [f"run {number}: {side.name} ({utc_minute(side.created) or side.tool})" for number, side in sides], "dim"
        ),
        Lines([rest] if omitted else []),
    ]
    print_blocks(blocks, console)


def print_gate(gate: Gate, console: Console) -> None:
    """Print a gate: its outcome in one line, the settings that differ, and a table of cells."""
    lines = [*machine_sentences(gate.comparison), *difference_lines(gate.comparison)]
    rows = gate_rows(gate)
    table = [text_table(GATE_COLUMNS, rows, texts=("gate",), caption=GATE_CAPTION)] if rows else []
    print_blocks([Sentences([gate_line(gate)]), Lines(lines), *table, _sides(gate.comparison)], console)
