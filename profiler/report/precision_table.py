"""Several precisions on the screen: what each saves, and every cell against the first."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from profiler.diagnosis.compare import against_first, sentences
from profiler.record.run import CELL_KEY, Run
from profiler.report.lines import quality_line, regimes
from profiler.units import duration, scaled, significant


def print_precisions(runs: Sequence[Run], console: Console) -> None:
    """Print runs of one model in several precisions, each against the first."""
    first = runs[0].document
    console.print()
    for sentence in sentences(runs):
        console.print(Text(sentence, style="bold"))
    console.print()
    memory = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    memory.add_column("precision", no_wrap=True)
    for name in ("in", "memory", "saved", "decode", "dequantising", "tok/s"):
        memory.add_column(name, justify="right", no_wrap=True)
    memory.add_column("regime", no_wrap=True)
    for run in runs:
        model, cells = run.document.model, run.cells[run.cells["status"] == "ok"]
        row = next(iter(cells[cells["phase"] == "decode"].to_dict("records")), None)
        saved = first.model["storage_bytes"] - model["storage_bytes"]
        figures = ["-"] * 4
        if row is not None:
            figures = [
                duration(row["latency_s"]),
                duration(row["dequantise_s"]) if row["dequantise_s"] else "-",
                significant(row["tokens_per_s"]),
                regimes(run)[tuple(row[name] for name in CELL_KEY)],
            ]
        memory.add_row(
            model["quant"],
            model["dtype"],
            scaled(model["storage_bytes"], "B"),
            scaled(saved, "B") if saved > 0 else "-",
            *figures,
        )
    console.print(Text(f"{first.model['id']} on {first.device['name']}"))
    console.print(memory)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("phase", "precision"):
        table.add_column(name, no_wrap=True)
    for name in ("batch", "tokens", "time", "speed-up", "interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in sorted(against_first(runs), key=lambda item: (item.phase, item.precision, item.batch_size, item.depth)):
        table.add_row(
            item.phase,
            item.precision,
            str(item.batch_size),
            str(item.depth),
            duration(item.time_s),
            f"{item.speed_up:.2f}x",
            f"{item.low:.2f} .. {item.high:.2f}",
        )
    console.print(table)
    for run in runs:
        if quality := quality_line(run):
            console.print(Text(f"{run.document.model['quant']} {quality}"))
    for run in runs:
        console.print(Text(f"run: {run.folder}", style="dim"))
