"""The tokens-per-second table, for the terminal and for files."""

from __future__ import annotations

from typing import Any

import pandas as pd
from rich import box
from rich.table import Table

from profiler.runstore import Run
from profiler.units import duration, percent, scaled, significant

TOKENS_TABLE_COLUMNS = (
    "phase",
    "batch_size",
    "prompt_len",
    "context_len",
    "status",
    "latency_s",
    "latency_low_s",
    "latency_high_s",
    "tokens_per_s",
    "tokens_per_s_per_seq",
    "flops_per_s",
    "bytes_per_s",
    "mfu",
    "mbu",
    "attained",
    "regime",
    "confidence",
)


def tokens_table(run: Run) -> pd.DataFrame:
    """The columns of the tokens-per-second table, one row a phase and cell, as numbers with their units in names."""
    return run.cells[list(TOKENS_TABLE_COLUMNS)]


def terminal_table(run: Run) -> Table:
    """The same as a rich table that fits 100 columns."""
    has_datasheet = bool(run.cells["mfu"].notna().any() or run.cells["mbu"].notna().any())
    # With a datasheet there are two more columns, and 100 characters still have to do.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0 if has_datasheet else 1, 0, 0))
    table.add_column("phase", no_wrap=True)
    for name in ("batch", "tokens", "time", "±", "tok/s", "TFLOP/s", "GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    if has_datasheet:
        table.add_column("MFU", justify="right", no_wrap=True)
        table.add_column("MBU", justify="right", no_wrap=True)
    table.add_column("roof", justify="right", no_wrap=True)
    table.add_column("regime", no_wrap=True)
    table.add_column("sure", no_wrap=True)
    flags = _flags(run)
    last_phase = None
    for row in run.cells.to_dict("records"):
        if last_phase is not None and row["phase"] != last_phase:
            table.add_section()
        last_phase = row["phase"]
        cell = row["phase"], row["batch_size"], row["prompt_len"]
        table.add_row(*_terminal_row(row, flags.get(cell, ""), has_datasheet=has_datasheet))
    return table


_SHORT_CONFIDENCE = {"high": "high", "medium": "med", "low": "low"}
# What a flag is called in the table; the evidence in run.json has their full names.
# These say why a roof is far away, which needs no word where one binds.
_CAUSES = ("inefficient-kernels", "wasteful-path")
_SHORT_FLAGS = {
    "inefficient-kernels": "kernels",
    "wasteful-path": "copies",
    "kv-bound": "KV",
    "above-roof": "above roof",
}


def _flags(run: Run) -> dict[tuple[str, int, int], str]:
    """Each cell's weightiest flag in a word: what stands beside its regime."""
    return {
        (item["phase"], item["batch_size"], item["prompt_len"]): next(
            (
                word
                for flag, word in _SHORT_FLAGS.items()
                if flag in item["flags"] and not (flag in _CAUSES and item["regime"] == "compute-bound")
            ),
            "",
        )
        for item in run.document.evidence
    }


def _terminal_row(row: dict[Any, Any], flags: str, *, has_datasheet: bool) -> list[str]:
    tokens = row["prompt_len"] if row["phase"] == "prefill" else row["context_len"]
    head = [row["phase"], str(row["batch_size"]), str(tokens)]
    if row["status"] != "ok":
        return [*head, *["-"] * (8 if has_datasheet else 6), f"({row['status']})", ""]
    half_width = (row["latency_high_s"] - row["latency_low_s"]) / 2 / row["latency_s"]
    noise = "" if row["noise"] == "quiet" else "~"
    interval = f"{noise}{100 * half_width:.1f}%" if row["samples"] > 1 else "n=1"
    return [
        *head,
        duration(row["latency_s"]),
        interval,
        significant(row["tokens_per_s"]),
        significant(row["flops_per_s"] / 1e12),
        significant(row["bytes_per_s"] / 1e9),
        *([_share(row["mfu"]), _share(row["mbu"])] if has_datasheet else []),
        percent(row["attained"]),
        f"{row['regime']} ({flags})" if flags else row["regime"],
        _SHORT_CONFIDENCE.get(row["confidence"], ""),
    ]


def _share(value: float) -> str:
    return "-" if pd.isna(value) else percent(value)


def roofs_lines(run: Run) -> list[str]:
    """The measured roofs in words, with the datasheet beside them where there is one."""
    ceilings, device = run.document.ceilings, run.document.device
    dtype = run.document.model["dtype"]
    compute = ceilings["compute"].get(dtype)
    lines = [
        f"memory {scaled(ceilings['memory_bytes_per_s'], 'B/s')}{_of(ceilings['memory_bytes_per_s'], device, 'bytes')}"
    ]
    if compute:
        lines.append(f"compute {scaled(compute['per_s'], 'FLOP/s')} in {dtype}{_of(compute['per_s'], device, 'flops')}")
    dispatch_s = ceilings["dispatch_s"]["decode"]
    smallest = min(dispatch_s, key=int, default=None)
    lines.append(f"dispatch {duration(dispatch_s[smallest])} a decode step" if smallest else "dispatch not measured")
    return lines


def _of(value: float, device: dict[str, Any], kind: str) -> str:
    peak = device.get(f"datasheet_{kind}_per_s")
    return f" ({percent(value / peak)} of the datasheet)" if peak else ""


def markdown_table(frame: pd.DataFrame) -> str:
    """A GitHub-flavoured Markdown table of any frame; numbers with four significant digits."""
    lines = ["| " + " | ".join(map(str, frame.columns)) + " |", "|" + "---|" * len(frame.columns)]
    for row in frame.itertuples(index=False):
        lines.append("| " + " | ".join(_markdown_cell(value) for value in row) + " |")
    return "\n".join(lines) + "\n"


def _markdown_cell(value: object) -> str:
    if isinstance(value, float):
        return "" if pd.isna(value) else f"{value:.4g}"
    return str(value).replace("|", "\\|")
