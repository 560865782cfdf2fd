"""The page's table of all cells: what is shown, and the plain value that sorting uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from profiler.diagnosis.cell import CellResult
from profiler.report.shown import half_width
from profiler.units import duration, percent, significant

Value = str | int | float | None


@dataclass(frozen=True)
class Column:
    """One column: its heading, its value, and how a number is shown."""

    heading: str
    value: Callable[[CellResult], Value]
    show: Callable[[float], str] | None = None


@dataclass(frozen=True)
class Entry:
    """One entry of the table."""

    text: str
    sort: str | int | float
    """Its plain value; empty where there is none."""
    number: bool


COLUMNS = (
    Column("phase", lambda cell: cell.phase),
    Column("engine", lambda cell: cell.engine),
    Column("batch", lambda cell: cell.batch_size),
    Column("prompt", lambda cell: cell.prompt_len),
    Column("context", lambda cell: cell.context_len),
    Column("status", lambda cell: cell.status),
    Column("time", lambda cell: cell.latency_s, duration),
    Column("±", half_width, percent),
    Column("visits", lambda cell: cell.visits),
    Column("p99", lambda cell: cell.p99_s, duration),
    Column("TTFT", lambda cell: cell.ttft_s, duration),
    Column("tokens/s", lambda cell: cell.tokens_per_s, significant),
    Column("TFLOP/s", lambda cell: cell.flops_per_s, lambda value: significant(value / 1e12)),
    Column("GB/s", lambda cell: cell.bytes_per_s, lambda value: significant(value / 1e9)),
    Column("MFU", lambda cell: cell.mfu, percent),
    Column("MBU", lambda cell: cell.mbu, percent),
    Column("roof", lambda cell: cell.attained, percent),
    Column("regime", lambda cell: cell.regime),
    Column("sure", lambda cell: cell.confidence),
    Column("noise", lambda cell: cell.noise),
)


def entries(result: CellResult) -> list[Entry]:
    """One row, in the order of COLUMNS."""
    return [_entry(column, column.value(result)) for column in COLUMNS]


class Packed(TypedDict):
    """A column of many rows, to be sorted in the page."""

    words: list[str]
    """Each text of it once, in ascending order of the values."""
    at: list[int]
    """The place of each row's own text among them."""


def packed(results: Sequence[CellResult]) -> list[Packed]:
    """The columns of a table, small enough for a page of ten thousand cells."""
    return [_packed([_entry(column, column.value(result)) for result in results]) for column in COLUMNS]


def _packed(column: Sequence[Entry]) -> Packed:
    values = {entry.text: entry.sort for entry in column}
    words = sorted(values, key=lambda text: (values[text] != "", values[text]))
    places = {text: place for place, text in enumerate(words)}
    return Packed(words=words, at=[places[entry.text] for entry in column])


def _entry(column: Column, value: Value) -> Entry:
    number = column.show is not None or isinstance(value, int)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Entry("-", "", number)
    text = column.show(float(value)) if column.show else str(value)
    return Entry(text, value, number)
