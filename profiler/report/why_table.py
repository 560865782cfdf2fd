"""Why a script is slow, on the screen."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from profiler.diagnosis.why import Why
from profiler.report.long_table import table
from profiler.report.why import CALL_COLUMNS, call_rows, note_lines, why_sentences


def print_why(why: Why, console: Console) -> None:
    """Print the answer, every kind of call, and how it is known."""
    console.print()
    for sentence in why_sentences(why):
        console.print(Text(sentence, style="bold"))
    console.print()
    console.print(table(CALL_COLUMNS, call_rows(why)))
    for warning in why.seen.warnings:
        console.print(Text(f"! {warning}", style="yellow"))
    for line in note_lines(why):
        console.print(Text(line, style="dim"))
