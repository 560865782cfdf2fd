"""The screen after a run: the answer first, then the roofs, one table, and the warnings."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from profiler.report.tables import (
    BAR_LEGEND,
    activity_lines,
    breakdown_table,
    engine_lines,
    instrument_line,
    quality_line,
    roofs_lines,
    split_bars,
    terminal_table,
    unexplained_lines,
)
from profiler.runstore import Run
from profiler.units import count


def print_run(run: Run, console: Console) -> None:
    """Print a run to the terminal."""
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
    if bars := split_bars(run):
        console.print()
        console.print(Text(f"where the time goes: {BAR_LEGEND}"))
        for name, bar, note in bars:
            console.print(Text(f"{name:<20} ").append(bar).append(f" {note}"))
        console.print()
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
