"""What `roofscope count` prints: totals, groups, operators, and the second opinion."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from profiler.units import count, duration, scaled, significant

_OPERATOR_COLUMNS = (
    "name",
    "group",
    "count",
    "dtype",
    "model_flops",
    "executed_flops",
    "model_bytes",
    "executed_bytes",
)


def print_count(document: dict[str, Any], console: Console) -> None:
    """Print the document of `roofscope count` as tables, 100 columns wide."""
    moved = document["bytes"]
    quant = "" if document["quant"] == "none" else f" {document['quant']}"
    console.print(
        f"{document['model']}: {count(document['params'])} parameters, {document['dtype']}{quant};"
        f" {document['phase']} of {document['batch']} x {document['query_tokens']} tokens"
        f" after {document['context_tokens']} cached",
        highlight=False,
    )
    console.print(
        f"model work: {document['model_flops']:,} FLOPs over {moved['total']:,.0f} bytes,"
        f" intensity {significant(document['intensity'], 4)} FLOP/byte",
        highlight=False,
    )
    parts = ", ".join(f"{name} {scaled(value, 'B')}" for name, value in moved.items() if value and name != "total")
    console.print(f"            {parts}", highlight=False)
    console.print(
        f"executed:   {document['executed_flops']:,} FLOPs over up to"
        f" {scaled(document['executed_bytes']['total'], 'B')}{_avoidable(document)}",
        highlight=False,
    )
    console.print(_groups(document["operators"]))
    if "gemms" in document:
        console.print(_plain_table(("m", "n", "k", "dtype", "count"), document["gemms"]))
    if "gpus" in document:
        console.print(_gpus(document["gpus"]))
    if "crosscheck" in document:
        _print_crosscheck(document["crosscheck"], console)
    if document["unknown"]:
        share = 100 * (1 - document["coverage"])
        console.print(f"! {share:.3g} % of the parameters are not understood: {'; '.join(document['unknown'])}")


def operators_csv(document: dict[str, Any]) -> str:
    """The operators as CSV, numbers in full."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, _OPERATOR_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(document["operators"])
    return buffer.getvalue()


def _avoidable(document: dict[str, Any]) -> str:
    causes = {**document["executed_bytes"]["avoidable"]}
    named = ", ".join(f"{cause} {scaled(value, 'B')}" for cause, value in causes.items() if value)
    return f" ({named})" if named else ""


def _groups(operators: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("operator")
    for name in ("count", "FLOPs", "share", "bytes", "share", "FLOP/byte"):
        table.add_column(name, justify="right")
    flops = sum(item["model_flops"] for item in operators) or 1
    moved = sum(item["model_bytes"] for item in operators) or 1
    groups: dict[str, list[dict[str, Any]]] = {}
    for item in operators:
        groups.setdefault(item["group"], []).append(item)
    for group, items in groups.items():
        if not any(item["model_flops"] or item["model_bytes"] for item in items):
            continue
        table.add_section()
        table.add_row(group, "", *_figures(items, flops, moved), style="bold")
        for item in items:
            if item["model_flops"] or item["model_bytes"]:
                table.add_row(f"  {item['name']}", str(item["count"]), *_figures([item], flops, moved))
    return table


def _figures(items: Iterable[dict[str, Any]], all_flops: float, all_bytes: float) -> list[str]:
    items = list(items)
    flops = sum(item["model_flops"] for item in items)
    moved = sum(item["model_bytes"] for item in items)
    return [
        scaled(flops, ""),
        f"{100 * flops / all_flops:.1f} %",
        scaled(moved, "B"),
        f"{100 * moved / all_bytes:.1f} %",
        significant(flops / moved) if moved else "-",
    ]


def _plain_table(columns: tuple[str, ...], rows: list[dict[str, Any]]) -> Table:
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    return table


def _gpus(rows: list[dict[str, Any]]) -> Table:
    table = Table("GPU", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("ridge FLOP/byte", "floor", "bound by"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["gpu"], significant(row["ridge_flops_per_byte"]), duration(row["floor_s"]), row["bound"])
    return table


def _print_crosscheck(check: dict[str, Any], console: Console) -> None:
    if check["equal"]:
        console.print(f"second opinion: {check['counter']} counts {check['flops']:,} executed FLOPs as well: equal")
        return
    console.print(f"second opinion: {check['counter']} counts {check['flops']:,}, the walk {check['walk_flops']:,}:")
    for item in check["differences"]:
        console.print(
            f"  {item['module'] or '(the model itself)'}: {item['counter_flops']:,}, not {item['walk_flops']:,}"
        )
