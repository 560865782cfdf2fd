"""The screen of `count`: totals, groups, operators, GPUs, and the cross-check."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pydantic import TypeAdapter
from rich import box
from rich.console import Console
from rich.table import Table

from profiler.units import duration, escape_formula, scaled, short_count, significant

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


@dataclass(frozen=True)
class _Operator:
    name: str
    group: str
    count: int
    model_flops: int | float
    model_bytes: int | float


@dataclass(frozen=True)
class _Executed:
    avoidable: Mapping[str, int | float]
    total: int | float


@dataclass(frozen=True)
class _Gemm:
    m: int | float
    n: int | float
    k: int | float
    dtype: str
    count: int | float


@dataclass(frozen=True)
class _Card:
    gpu: str
    dtype: str
    ridge_flops_per_byte: float | None
    floor_s: float | None
    bound: str | None
    refusal: str | None


@dataclass(frozen=True)
class _Gguf:
    name: str
    types: tuple[str, ...]
    kept_by_kernels: bool


@dataclass(frozen=True)
class _Difference:
    module: str
    counter_flops: int | float
    walk_flops: int | float


@dataclass(frozen=True)
class _Crosscheck:
    counter: str
    flops: int | float
    walk_flops: int | float
    equal: bool
    differences: tuple[_Difference, ...]
    left_out: tuple[_Difference, ...] = ()


@dataclass(frozen=True)
class _Exchange:
    name: str
    kind: str
    count: int
    bytes: int


@dataclass(frozen=True)
class _Share:
    ranks: int
    weight_bytes: int
    cache_bytes: int
    replicated_kv_heads: int
    link_bytes: int
    bus_bytes: int
    collectives: tuple[_Exchange, ...]


@dataclass(frozen=True)
class _Counted:
    """The part of the document of `roofscope count` that is printed."""

    model: str
    params: int
    dtype: str
    quant: str
    published: str | None
    gguf: _Gguf | None
    note: str
    phase: str
    batch: int
    query_tokens: int
    context_tokens: int
    model_flops: int | float
    executed_flops: int | float
    bytes: Mapping[str, int | float]
    executed_bytes: _Executed
    intensity: float
    coverage: float
    unknown: tuple[str, ...]
    operators: tuple[_Operator, ...]
    gemms: tuple[_Gemm, ...] = ()
    gpus: tuple[_Card, ...] = ()
    crosscheck: _Crosscheck | None = None
    tp: _Share | None = None


_COUNTED = TypeAdapter(_Counted)


def print_count(document: Mapping[str, Any], console: Console) -> None:
    """Print the document of `roofscope count` as tables, 100 columns wide."""
    counted = _COUNTED.validate_python(document)
    for line in _totals(counted):
        console.print(line, highlight=False)
    if counted.tp is not None:
        console.print(_one_rank(counted.tp), highlight=False)
    console.print(_groups(counted.operators))
    if counted.tp is not None:
        console.print(_collectives(counted.tp))
    if counted.gemms:
        console.print(_gemms(counted.gemms))
    _print_cards(counted.gpus, counted.dtype, console)
    if counted.crosscheck is not None:
        _print_crosscheck(counted.crosscheck, console)
    if counted.unknown:
        share = 100 * (1 - counted.coverage)
        console.print(f"! {share:.3g} % of the parameters are not understood: {'; '.join(counted.unknown)}")


def count_csv(document: Mapping[str, Any]) -> str:
    """The operators as CSV, numbers in full."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, _OPERATOR_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "name": escape_formula(row["name"])} for row in document["operators"])
    return buffer.getvalue()


def _totals(counted: _Counted) -> list[str]:
    moved = counted.bytes
    quant = "" if counted.quant == "none" else f" {counted.quant}"
    parts = ", ".join(f"{name} {scaled(value, 'B')}" for name, value in moved.items() if value and name != "total")
    avoidable = ", ".join(
        f"{cause} {scaled(value, 'B')}" for cause, value in counted.executed_bytes.avoidable.items() if value
    )
    return [
        f"{counted.model}: {short_count(counted.params)} parameters, {counted.dtype}{quant};"
        f" {counted.phase} of {counted.batch} x {counted.query_tokens} tokens after {counted.context_tokens} cached",
        f"model work: {counted.model_flops:,} FLOPs over {moved['total']:,.0f} bytes,"
        f" intensity {significant(counted.intensity, 4)} FLOP/byte",
        f"            {parts}",
        f"executed:   {counted.executed_flops:,} FLOPs over up to {scaled(counted.executed_bytes.total, 'B')}"
        + (f" ({avoidable})" if avoidable else ""),
        *([f"stored:     {_as_published(counted.published)}"] if counted.published else []),
        *([f"stored:     {_dequantised(counted.gguf, counted.dtype)}"] if counted.gguf and counted.gguf.types else []),
        *([f"note:       {counted.note}"] if counted.note else []),
    ]


def _as_published(form: str) -> str:
    """MXFP4 is that of a mixture's experts alone; of other forms what is left dense differs."""
    return f"{'experts' if form == 'mxfp4' else 'weights'} as published: {form.upper()}"


def _dequantised(file: _Gguf, dtype: str) -> str:
    kept = " where it has no kernel for the device" if file.kept_by_kernels else ""
    return f"dequantised from {file.name} to {dtype}, as transformers loads it{kept}"


def _groups(operators: Sequence[_Operator]) -> Table:
    table = _table("operator", "count", "FLOPs", "share", "bytes", "share", "FLOP/byte")
    flops = sum(item.model_flops for item in operators) or 1
    moved = sum(item.model_bytes for item in operators) or 1
    groups: dict[str, list[_Operator]] = {}
    for item in operators:
        if item.model_flops or item.model_bytes:
            groups.setdefault(item.group, []).append(item)
    for group, items in groups.items():
        table.add_section()
        table.add_row(group, "", *_figures(items, flops, moved), style="bold")
        for item in items:
            table.add_row(f"  {item.name}", str(item.count), *_figures([item], flops, moved))
    return table


def _figures(items: Sequence[_Operator], all_flops: float, all_bytes: float) -> list[str]:
    flops = sum(item.model_flops for item in items)
    moved = sum(item.model_bytes for item in items)
    return [
        scaled(flops, ""),
        f"{100 * flops / all_flops:.1f} %",
        scaled(moved, "B"),
        f"{100 * moved / all_bytes:.1f} %",
        significant(flops / moved) if moved else "-",
    ]


def _one_rank(share: _Share) -> str:
    copied = f" ({share.replicated_kv_heads} KV heads, each held by several)" if share.replicated_kv_heads else ""
    return (
        f"one rank:   all of this is one of {share.ranks} ranks': it holds {scaled(share.weight_bytes, 'B')} of weights"
        f" and {scaled(share.cache_bytes, 'B')} of KV cache{copied}, and sends {scaled(share.bus_bytes, 'B')} a step"
    )


def _collectives(share: _Share) -> Table:
    table = _table("collective", "count", "bytes of one")
    for item in share.collectives:
        table.add_row(item.name, str(item.count), scaled(item.bytes, "B"))
    return table


def _gemms(rows: Sequence[_Gemm]) -> Table:
    columns = [item.name for item in fields(_Gemm)]
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*(str(getattr(row, column)) for column in columns))
    return table


def _print_cards(cards: Sequence[_Card], dtype: str, console: Console) -> None:
    """A table of the cards that can hold the step, and a line for each that cannot."""
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


def _print_crosscheck(check: _Crosscheck, console: Console) -> None:
    if check.equal:
        console.print(f"second opinion: {check.counter} counts {check.flops:,} executed FLOPs as well: equal")
    else:
        console.print(f"second opinion: {check.counter} counts {check.flops:,}, the walk {check.walk_flops:,}:")
    for item in check.differences:
        console.print(f"  {item.module or '(the model itself)'}: {item.counter_flops:,}, not {item.walk_flops:,}")
    for item in check.left_out:
        console.print(f"  left out: {item.module}, whose angles are a product of {item.counter_flops:,} FLOPs")
