"""Terminal output of `count`: totals, groups, operators, GPUs, and the cross-check."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from profiler.facts.step import Work, bytes_by_kind, plain_number
from profiler.units import duration, escape_formula, scaled, short_count, significant

if TYPE_CHECKING:
    from profiler.counting.count import RankShare, StepCount
    from profiler.counting.crosscheck import Crosscheck
    from profiler.counting.floor import CardFloor
    from profiler.counting.operators import GemmShape, Operator
    from profiler.quant.checkpoints import Gguf

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


def print_count(counted: StepCount, console: Console) -> None:
    """Print a counted step as tables, 100 columns wide."""
    for line in _totals(counted):
        console.print(line, highlight=False)
    if counted.share is not None:
        console.print(_one_rank(counted.share), highlight=False)
    console.print(_groups(counted.by_operator))
    if counted.share is not None:
        console.print(_collectives(counted.share))
    if counted.gemms:
        console.print(_gemms(counted.gemms))
    _print_cards(counted.gpus, counted.dtype, console)
    if counted.crosscheck is not None:
        _print_crosscheck(counted.crosscheck, console)
    if counted.unknown:
        share = 100 * (1 - counted.coverage)
        console.print(f"! {share:.3g} % of the parameters are not understood: {'; '.join(counted.unknown)}")


def count_csv(counted: StepCount) -> str:
    """Return the operators as CSV, with unrounded numbers."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, _OPERATOR_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    rows = counted.as_json()["operators"]
    writer.writerows({**row, "name": escape_formula(row["name"])} for row in rows)
    return buffer.getvalue()


def _totals(counted: StepCount) -> list[str]:
    work, step = counted.work, counted.step
    moved = bytes_by_kind(work)
    quant = "" if counted.quant == "none" else f" {counted.quant}"
    parts = ", ".join(f"{name} {scaled(value, 'B')}" for name, value in moved.items() if value and name != "total")
    avoidable = ", ".join(
        f"{cause} {scaled(float(value), 'B')}" for cause, value in work.avoidable_bytes.items() if value
    )
    return [
        f"{counted.model}: {short_count(counted.params)} parameters, {counted.dtype}{quant};"
        f" {counted.phase} of {step.batch} x {step.query} tokens after {step.context} cached",
        f"model work: {plain_number(work.model_flops):,} FLOPs over {moved['total']:,.0f} bytes,"
        f" intensity {significant(float(work.intensity), 4)} FLOP/byte",
        f"            {parts}",
        f"executed:   {plain_number(work.executed_flops):,} FLOPs over up to {scaled(float(work.executed_bytes), 'B')}"
        + (f" ({avoidable})" if avoidable else ""),
        *([f"stored:     {_as_published(counted.published)}"] if counted.published else []),
        *([f"stored:     {_dequantised(counted.gguf, counted.dtype)}"] if counted.gguf and counted.gguf.types else []),
        *([f"note:       {counted.note}"] if counted.note else []),
    ]


def _as_published(form: str) -> str:
    """MXFP4 covers only the experts of a mixture; in other formats, the layers left dense differ by checkpoint."""
    return f"{'experts' if form == 'mxfp4' else 'weights'} as published: {form.upper()}"


def _dequantised(file: Gguf, dtype: str) -> str:
    condition = " where it has no kernel for the device" if file.kept_by_kernels else ""
    return f"dequantised from {file.name} to {dtype}, as transformers loads it{condition}"


def _groups(operators: Sequence[tuple[Operator, Work]]) -> Table:
    table = _table("operator", "count", "FLOPs", "share", "bytes", "share", "FLOP/byte")
    flops = sum(float(work.model_flops) for _, work in operators) or 1
    moved = sum(float(work.model_bytes) for _, work in operators) or 1
    groups: dict[str, list[tuple[Operator, Work]]] = {}
    for operator, work in operators:
        if work.model_flops or work.model_bytes:
            groups.setdefault(operator.group, []).append((operator, work))
    for group, items in groups.items():
        table.add_section()
        table.add_row(group, "", *_figures([work for _, work in items], flops, moved), style="bold")
        for operator, work in items:
            table.add_row(f"  {operator.name}", str(operator.count), *_figures([work], flops, moved))
    return table


def _figures(items: Sequence[Work], all_flops: float, all_bytes: float) -> list[str]:
    flops = sum(float(work.model_flops) for work in items)
    moved = sum(float(work.model_bytes) for work in items)
    return [
        scaled(flops, ""),
        f"{100 * flops / all_flops:.1f} %",
        scaled(moved, "B"),
        f"{100 * moved / all_bytes:.1f} %",
        significant(flops / moved) if moved else "-",
    ]


def _one_rank(share: RankShare) -> str:
    copied = f" ({share.replicated_kv_heads} KV heads, each held by several)" if share.replicated_kv_heads else ""
    return (
        f"one rank:   all of this is one of {share.ranks} ranks': it holds {scaled(share.weight_bytes, 'B')} of weights"
        f" and {scaled(share.cache_bytes, 'B')} of KV cache{copied}, and sends {scaled(share.bus_bytes, 'B')} a step"
    )


def _collectives(share: RankShare) -> Table:
    table = _table("collective", "count", "bytes of one")
    for item in share.collectives:
        table.add_row(item.name, str(item.count), scaled(item.bytes, "B"))
    return table


def _gemms(rows: Sequence[GemmShape]) -> Table:
    columns = [item.name for item in fields(rows[0])]
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*(str(getattr(row, column)) for column in columns))
    return table


def _print_cards(cards: Sequence[CardFloor], dtype: str, console: Console) -> None:
    """Print a table of the GPUs that the step fits, and a line for each other one."""
    table = _table("GPU", "ridge FLOP/byte", "floor", "bound by")
    for card in cards:
        if card.floor_s is not None and card.ridge_flops_per_byte is not None:
            ridge = significant(card.ridge_flops_per_byte)
            table.add_row(card.gpu, ridge, duration(card.floor_s), card.bound or "-")
    if table.row_count:
        console.print(table)
    for card in cards:
        if card.refusal:
            console.print(card.refusal, highlight=False)
        elif card.dtype != dtype:
            console.print(f"{card.gpu}: has no {dtype} units; its floor is that of {card.dtype}", highlight=False)


def _table(first: str, *numbers: str) -> Table:
    table = Table(first, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _print_crosscheck(check: Crosscheck, console: Console) -> None:
    if check.equal:
        console.print(f"second opinion: {check.counter} counts {check.flops:,} executed FLOPs as well: equal")
    else:
        console.print(f"second opinion: {check.counter} counts {check.flops:,}, the walk {check.walk_flops:,}:")
    for item in check.differences:
        console.print(f"  {item.module or '(the model itself)'}: {item.counter_flops:,}, not {item.walk_flops:,}")
    for item in check.left_out:
        console.print(f"  left out: {item.module}, whose angles are a product of {item.counter_flops:,} FLOPs")
