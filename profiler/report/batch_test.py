"""Terminal output of the batch-doubling test."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from profiler.grid.cells import Phase
from profiler.judge.cells import CellResult
from profiler.judge.scaling import Doubling, DoublingTest
from profiler.report.sections import roofs_lines
from profiler.store.folder import Run
from profiler.units import duration, significant


def print_doubling(run: Run, phase: Phase, console: Console) -> None:
    """Print the batch series of a run: its conclusions, then a row per doubling."""
    series = [test for test in run.document.scaling if test.axis == "batch" and test.fixed["phase"] == phase]
    console.print()
    for test in series:
        _print_series(run, test, console)
    if not series:
        console.print("fewer than two batches have a number: nothing to compare.")
    for warning in run.document.warnings:
        console.print(Text(f"! {warning}", style="yellow"))
    console.print(Text(f"run: {run.folder}", style="dim"))


def _print_series(run: Run, test: DoublingTest, console: Console) -> None:
    for sentence in test.sentences:
        console.print(Text(sentence, style="bold"))
    fixed, model = test.fixed, run.model
    depth = f"{fixed['prompt_len']} prompt tokens" if fixed["prompt_len"] else f"context {fixed['context_len']}"
    console.print()
    console.print(Text(f"{model.id}, {model.dtype}, {fixed['phase']} with the engine {fixed['engine']}, {depth}"))
    console.print(Text("measured roofs: " + ", ".join(roofs_lines(run))))
    console.print(_table(test, {result.batch_size: result for result in run.measured if test.holds(result)}))


def _table(test: DoublingTest, by_batch: dict[int, CellResult]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("batch", "time", "tok/s", "gain", "slope", "interval", "by bytes", "by FLOPs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("speaks for", no_wrap=True)
    table.add_row(*_size(by_batch[test.doublings[0].smaller]), *[""] * 6)
    for step in test.doublings:
        table.add_row(*_size(by_batch[step.larger]), *slope_texts(step))
    return table


def _size(result: CellResult) -> list[str]:
    return [str(result.batch_size), duration(result.latency_s), significant(result.tokens_per_s)]


def slope_texts(step: Doubling) -> list[str]:
    """Return gain, slope, interval, the slopes that bytes and FLOPs predict, and the regime that the slope supports."""
    return [
        f"{step.gain:.2f}x",
        f"{step.slope:.2f}",
        f"{step.low:.2f} .. {step.high:.2f}",
        f"{step.bytes_slope:.2f}",
        f"{step.flops_slope:.2f}",
        step.side,
    ]
