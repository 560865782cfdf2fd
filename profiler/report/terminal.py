"""The screen after a run: the answer first, then the roofs, one table, and the warnings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from profiler.diagnosis.step_time import TERM_NAMES
from profiler.record.run import CELL_KEY, Run
from profiler.report.lines import (
    _WORTH_SHOWING,
    activity_lines,
    breakdown_rows,
    cell_name,
    engine_lines,
    instrument_line,
    quality_line,
    regimes,
    roofs_lines,
    unexplained_lines,
)
from profiler.units import count, duration, percent, significant


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


def terminal_table(run: Run) -> Table:
    """The same as a rich table that fits 100 columns."""
    has_datasheet = bool(run.cells["mfu"].notna().any() or run.cells["mbu"].notna().any())
    engines = run.cells["engine"].nunique() > 1
    # 100 characters have to do: further columns push the gaps out, and then the rates that MFU and MBU repeat.
    padding = (0, 0 if has_datasheet or engines else 1, 0, 0)
    rates = not (has_datasheet and engines)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
    for name in ("phase", *(["engine"] if engines else [])):
        table.add_column(name, no_wrap=True)
    numbers = ["batch", "tokens", "time", "±", "tok/s", *(["TFLOP/s", "GB/s"] if rates else [])]
    for name in (*numbers, *(["MFU", "MBU"] if has_datasheet else []), "roof"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("regime", "sure"):
        table.add_column(name, no_wrap=True)
    words = regimes(run)
    last_phase = None
    for row in run.cells.to_dict("records"):
        if last_phase is not None and row["phase"] != last_phase:
            table.add_section()
        last_phase = row["phase"]
        cell = tuple(row[name] for name in CELL_KEY)
        table.add_row(
            *_terminal_row(row, words.get(cell, ""), has_datasheet=has_datasheet, engines=engines, rates=rates)
        )
    return table


_SHORT_CONFIDENCE = {"high": "high", "medium": "med", "low": "low"}


def _terminal_row(row: dict[Any, Any], regime: str, *, has_datasheet: bool, engines: bool, rates: bool) -> list[str]:
    tokens = row["prompt_len"] if row["phase"] == "prefill" else row["context_len"]
    head = [row["phase"], *([row["engine"]] if engines else []), str(row["batch_size"]), str(tokens)]
    if row["status"] != "ok":
        return [*head, *["-"] * (4 + 2 * rates + 2 * has_datasheet), f"({row['status']})", ""]
    half_width = (row["latency_high_s"] - row["latency_low_s"]) / 2 / row["latency_s"]
    noise = "" if row["noise"] == "quiet" else "~"
    interval = f"{noise}{100 * half_width:.1f}%" if row["samples"] > 1 else "n=1"
    return [
        *head,
        duration(row["latency_s"]),
        interval,
        significant(row["tokens_per_s"]),
        *([significant(row["flops_per_s"] / 1e12), significant(row["bytes_per_s"] / 1e9)] if rates else []),
        *([_share(row["mfu"]), _share(row["mbu"])] if has_datasheet else []),
        percent(row["attained"]),
        regime,
        _SHORT_CONFIDENCE.get(row["confidence"], ""),
    ]


def _share(value: float) -> str:
    return "-" if pd.isna(value) else percent(value)


def breakdown_table(run: Run) -> Table:
    """Where the time inside a step goes: for the smallest and the largest cell of each phase."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("inside", no_wrap=True)
    for name in ("time", "share", "TFLOP/s", "GB/s", "FLOP/byte", "roof"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in breakdown_rows(run):
        if not row[0].startswith(" ") and table.row_count:
            table.add_section()
        table.add_row(*row)
    return table


_BAR_WIDTH = 48
_MOST_BARS_A_PHASE = 8
# A letter and a colour each, so that the bars read the same without colours.
_BAR_STYLE = {
    "weights_s": ("w", "blue"),
    "kv_s": ("v", "cyan"),
    "compute_s": ("a", "yellow"),
    "dequantise_s": ("q", "green"),
    "kernel_s": ("k", "red"),
    "avoidable_s": ("x", "bright_yellow"),
    "dispatch_s": ("d", "magenta"),
    "unexplained_s": ("?", "bright_black"),
}


BAR_LEGEND = ", ".join(f"{letter} {TERM_NAMES[term]}" for term, (letter, _) in _BAR_STYLE.items())


def split_bars(run: Run) -> list[tuple[str, Text, str]]:
    """Each cell's time as a bar of its terms, with what is negative beside it; of many cells those that span them."""
    cells = run.cells[(run.cells["status"] == "ok") & (run.cells["engine"] == run.document.engine["names"][0])]
    shown = []
    for phase in ("prefill", "decode"):
        rows = cells[cells["phase"] == phase].to_dict("records")
        steps = min(_MOST_BARS_A_PHASE, len(rows))
        shown += [rows[round(index * (len(rows) - 1) / max(1, steps - 1))] for index in range(steps)]
    return [(cell_name(row), _bar(row), _below_zero(row)) for row in shown]


def _bar(row: Mapping[Any, Any]) -> Text:
    """As many letters as a term's share of the positive terms; edges are rounded, so that the bar is always full."""
    shares = {term: max(0.0, row[term]) for term in _BAR_STYLE}
    whole, reached, bar = sum(shares.values()) or 1.0, 0.0, Text()
    for term, (letter, color) in _BAR_STYLE.items():
        start = round(_BAR_WIDTH * reached / whole)
        reached += shares[term]
        bar.append(letter * (round(_BAR_WIDTH * reached / whole) - start), style=color)
    return bar


def _below_zero(row: Mapping[Any, Any]) -> str:
    below = {TERM_NAMES[term]: row[term] / row["latency_s"] for term in _BAR_STYLE if row[term] < 0}
    name = min(below, key=lambda key: below[key], default="")
    return f"{name} {percent(below[name])}" if name and below[name] <= -_WORTH_SHOWING else ""
