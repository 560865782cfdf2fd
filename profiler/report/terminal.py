"""The screen after a run: the answer first, then the roofs, one table, and the warnings."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from profiler.report.tables import (
    activity_lines,
    breakdown_table,
    engine_lines,
    instrument_line,
    quality_line,
    roofs_lines,
    terminal_table,
    unexplained_lines,
)
from profiler.runstore import Run
from profiler.units import count

_WIDTH = 100


def print_run(run: Run, console: Console | None = None) -> None:
    """Print a run to the terminal, 100 columns wide at most."""
    console = console or Console(width=min(_WIDTH, Console().width) if Console().is_terminal else _WIDTH)
    model, device = run.document.model, run.document.device
    console.print()
    for sentence in run.answer:
        console.print(Text(sentence, style="bold"))
    console.print()
    quant = "" if model["quant"] == "none" else f" {model['quant']}"
    random = ", random weights" if model["weights"] == "random" else ""
    console.print(
        Text(
            f"{model['id']}: {count(model['params'])} parameters, {model['dtype']}{quant}{random}, on {device['name']}"
        )
    )
    console.print(Text("measured roofs: " + ", ".join(roofs_lines(run))))
    console.print(terminal_table(run))
    if run.document.breakdown:
        console.print(breakdown_table(run))
    for line in (*activity_lines(run), *unexplained_lines(run)):
        console.print(Text(line))
    for line in engine_lines(run):
        console.print(Text(line))
    if quality := quality_line(run):
        console.print(Text(quality))
    console.print(Text(instrument_line(run), style="dim"))
    for warning in run.document.warnings:
        console.print(Text(f"! {warning}", style="yellow"))
    console.print(Text(f"run: {run.folder}", style="dim"))
