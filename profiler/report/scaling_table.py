"""The doubling test on the screen."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from profiler.record.run import Run
from profiler.report.lines import roofs_lines
from profiler.units import duration, significant


def print_doubling(run: Run, phase: str, console: Console) -> None:
    """Print the batch series of a run: what it says first, then every doubling."""
    series = [item for item in run.document.scaling if item["axis"] == "batch" and item["fixed"]["phase"] == phase]
    console.print()
    for item in series:
        for sentence in item["sentences"]:
            console.print(Text(sentence, style="bold"))
        fixed = item["fixed"]
        depth = f"{fixed['prompt_len']} prompt tokens" if fixed["prompt_len"] else f"context {fixed['context_len']}"
        model = run.document.model
        console.print()
        console.print(Text(f"{model['id']}, {model['dtype']}, {phase} with the engine {fixed['engine']}, {depth}"))
        console.print(Text("measured roofs: " + ", ".join(roofs_lines(run))))
        console.print(_table(item, _times(run, fixed)))
    if not series:
        console.print("fewer than two batches have a number: nothing to compare.")
    for warning in run.document.warnings:
        console.print(Text(f"! {warning}", style="yellow"))
    console.print(Text(f"run: {run.folder}", style="dim"))


def _times(run: Run, fixed: dict[str, Any]) -> dict[int, tuple[float, float]]:
    cells = run.cells
    for column, value in fixed.items():
        cells = cells[cells[column] == value]
    return {row["batch_size"]: (row["latency_s"], row["tokens_per_s"]) for row in cells.to_dict("records")}


def _table(item: dict[str, Any], times: dict[int, tuple[float, float]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("batch", "time", "tok/s", "gain", "slope", "interval", "by bytes", "by FLOPs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("speaks for", no_wrap=True)
    first = item["doublings"][0]["smaller"]
    table.add_row(str(first), duration(times[first][0]), significant(times[first][1]), *[""] * 6)
    for step in item["doublings"]:
        time_s, tokens_per_s = times[step["larger"]]
        table.add_row(
            str(step["larger"]),
            duration(time_s),
            significant(tokens_per_s),
            f"{step['gain']:.2f}x",
            f"{step['slope']:.2f}",
            f"{step['low']:.2f} .. {step['high']:.2f}",
            f"{step['bytes_slope']:.2f}",
            f"{step['flops_slope']:.2f}",
            step["side"],
        )
    return table
