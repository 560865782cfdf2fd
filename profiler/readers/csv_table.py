"""Read CSV tables with batch_size, prompt_len, new_tokens, tokens_per_s; optional phase, context_len, latency_s.

Optional, too: `samples_s`, the seconds of each repetition, separated by semicolons, and `bits_per_weight` as stored.

A table may have a hundred thousand rows, so it is read column by column.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeVar

from profiler.errors import RequestError
from profiler.readers.columns import Table
from profiler.readers.figures import Covers, Figure, ForeignFile, Record, half_a_unit, number_of, whole_of

_REQUIRED = {"batch_size", "prompt_len"}
_COVERS: dict[str, Covers] = {"prefill": "prefill", "decode": "decode", "generate": "generate"}
_TIMES = ("latency_s", "tokens_per_s")
_NO_PHASE = ("no phase named: read as decode steps only",)
_LARGEST = 2**53

_Number = TypeVar("_Number", bound=float)


def read_csv_table(records: Sequence[Record]) -> ForeignFile | None:
    """The figures of a table; None if it lacks the columns. Raises RequestError naming the broken row."""
    first = records[0]
    if not first.keys() >= _REQUIRED or not any(name in first for name in _TIMES):
        return None
    rows = [number for number, record in enumerate(records, 1) if record.get("status") in (None, "", "ok")]
    names = set().union(*records)
    measured = records if len(rows) == len(records) else [records[number - 1] for number in rows]

    def column(name: str) -> _Column:
        return _Column(name, rows, [row.get(name) for row in measured] if name in names else [None] * len(rows))

    phases = [(phase or "").strip() for phase in column("phase").cells]
    for number, phase in zip(rows, phases, strict=True):
        if phase and phase not in _COVERS:
            raise RequestError(f"row {number}: {phase[:40]!r} is not a phase; use prefill, decode or generate.")
    batches = column("batch_size").integers(1)
    prompts = [prompt or None for prompt in column("prompt_len").optional_integers(0)]
    news = column("new_tokens").optional_integers(1)
    covers = [_COVERS[phase or ("decode" if new else "prefill")] for phase, new in zip(phases, news, strict=True)]
    tokens = list(map(_tokens, covers, batches, prompts, news))
    if 0 in tokens:
        empty = tokens.index(0)
        raise RequestError(f"row {rows[empty]}: a {covers[empty]} of 0 tokens has no time.")
    latencies, rates = column("latency_s"), column("tokens_per_s")
    seconds = _seconds(latencies, rates, tokens)
    samples = column("samples_s").lists()
    bits = column("bits_per_weight").optional_positive()
    columns: dict[str, Sequence[Any]] = {
        "covers": covers,
        "seconds": seconds,
        "rounding_s": list(map(_rounding_s, latencies.cells, rates.cells, seconds)),
        "batch_size": batches,
        "prompt_len": prompts,
        # With a prompt, the context follows from it.
        "context_len": column("context_len").where([not prompt for prompt in prompts]).optional_integers(0),
        "new_tokens": news,
        "samples_s": samples,
        "repeats": [
            len(seen) or repeats or 0
            for seen, repeats in zip(samples, column("repeats").optional_integers(1), strict=True)
        ],
        "weight_bytes": [width and width / 8 for width in bits],
        "notes": [() if phase or not new else _NO_PHASE for phase, new in zip(phases, news, strict=True)],
    }
    return ForeignFile("", "table", Table(Figure, columns))


def _tokens(covers: Covers, batch: int, prompt: int | None, new: int | None) -> int:
    return batch * ((prompt or 0) if covers == "prefill" else 1 if covers == "decode" else new or 0)


def _seconds(latencies: _Column, rates: _Column, tokens: Sequence[int]) -> list[float]:
    """The latencies, or tokens / rate in rows without a latency."""
    has_latency = [bool(cell) for cell in latencies.cells]
    seconds = iter(latencies.only(has_latency).positive())
    per_s = iter(rates.only([not has for has in has_latency]).positive())
    return [next(seconds) if has else count / next(per_s) for has, count in zip(has_latency, tokens, strict=True)]


def _rounding_s(latency: Any, rate: Any, seconds: float) -> float:
    """Half a unit of the last printed digit, in seconds."""
    return half_a_unit(latency) if latency else seconds * half_a_unit(rate) / float(rate)


@dataclass(frozen=True)
class _Column:
    """The cells of a column, each with the number of its row in the file."""

    name: str
    rows: Sequence[int]
    cells: Sequence[Any]

    def only(self, chosen: Sequence[bool]) -> _Column:
        """The column with only the cells that `chosen` picks."""
        return _Column(self.name, [*compress(self.rows, chosen)], [*compress(self.cells, chosen)])

    def where(self, chosen: Sequence[bool]) -> _Column:
        """The column with all cells empty that `chosen` does not pick."""
        cells = [cell if has else None for cell, has in zip(self.cells, chosen, strict=True)]
        return _Column(self.name, self.rows, cells)

    def positive(self) -> list[float]:
        return self._numbers(float, math.ulp(0.0), lambda cell: number_of(cell, self.name))

    def optional_positive(self) -> list[float | None]:
        """The positive numbers of the column, with None for an empty cell."""
        present = [bool(cell) for cell in self.cells]
        numbers = iter(self.only(present).positive())
        return [next(numbers) if has else None for has in present]

    def lists(self) -> list[tuple[float, ...]]:
        """The positive numbers in each cell, separated by semicolons; empty for an empty cell."""
        found: list[tuple[float, ...]] = []
        for row, cell in zip(self.rows, self.cells, strict=True):
            try:
                texts = str(cell).split(";") if cell else []
                found.append(tuple(number_of(text.strip(), self.name) for text in texts))
            except RequestError as error:
                raise RequestError(f"row {row}: {error}") from None
        return found

    def integers(self, least: int) -> list[int]:
        return self._numbers(int, least, lambda cell: whole_of(cell, self.name, least))

    def optional_integers(self, least: int) -> list[int | None]:
        """The integers of the column, with None for an empty cell."""
        present = [bool(cell) for cell in self.cells]
        if all(present):
            return [*self.integers(least)]
        numbers = iter(self.only(present).integers(least))
        return [next(numbers) if has else None for has in present]

    def _numbers(
        self, convert: Callable[[Any], _Number], least: float, checked: Callable[[object], _Number]
    ) -> list[_Number]:
        """All texts converted at once if they are valid, else cell by cell, to name the broken row."""
        numbers: list[_Number] = []
        with contextlib.suppress(ValueError):
            numbers = list(map(convert, self.cells)) if set(map(type, self.cells)) == {str} else []
        if numbers and all(map(math.isfinite, numbers)) and least <= min(numbers) and max(numbers) < _LARGEST:
            return numbers
        numbers = []
        for row, cell in zip(self.rows, self.cells, strict=True):
            try:
                numbers.append(checked(cell))
            except RequestError as error:
                raise RequestError(f"row {row}: {error}") from None
        return numbers
