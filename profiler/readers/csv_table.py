"""CSV tables with batch_size, prompt_len, new_tokens, tokens_per_s; optional phase, context_len, latency_s.

It may have a hundred thousand rows, and is therefore read column by column.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeVar

from profiler.errors import RequestError
from profiler.readers.columns import Table
from profiler.readers.figures import Covers, Figure, ForeignFile, half_a_unit, number_of, whole_of

_NEEDED = {"batch_size", "prompt_len"}
_COVERS: dict[str, Covers] = {"prefill": "prefill", "decode": "decode", "generate": "generate"}
_TIMES = ("latency_s", "tokens_per_s")
_UNNAMED = ("no phase named: taken for decode steps alone",)
_LARGEST = 2**53

_Number = TypeVar("_Number", bound=float)


def read_csv_table(records: Sequence[Mapping[str, Any]]) -> ForeignFile | None:
    """The figures of a table; None where it lacks the columns. Raises RequestError naming the row that is broken."""
    first = records[0] if records else {}
    if not first.keys() >= _NEEDED or not any(name in first for name in _TIMES):
        return None
    rows = [number for number, record in enumerate(records, 1) if record.get("status") in (None, "", "ok")]
    known = set().union(*records)
    kept = records if len(rows) == len(records) else [records[number - 1] for number in rows]

    def column(name: str) -> _Column:
        return _Column(name, rows, [record.get(name) for record in kept] if name in known else [None] * len(kept))

    phases = [(phase or "").strip() for phase in column("phase").cells]
    for number, phase in zip(rows, phases, strict=True):
        if phase and phase not in _COVERS:
            raise RequestError(f"row {number}: the phase {phase[:40]!r} is none; use prefill, decode or generate.")
    batches = column("batch_size").wholes(1)
    prompts = [prompt or None for prompt in column("prompt_len").wholes_told(0)]
    news = column("new_tokens").wholes_told(1)
    covers = [_COVERS[phase or ("decode" if new else "prefill")] for phase, new in zip(phases, news, strict=True)]
    tokens = list(map(_tokens, covers, batches, prompts, news))
    if 0 in tokens:
        empty = tokens.index(0)
        raise RequestError(f"row {rows[empty]}: a {covers[empty]} without tokens has no time.")
    latencies, rates = column("latency_s"), column("tokens_per_s")
    seconds = _seconds(latencies, rates, tokens)
    columns: dict[str, Sequence[Any]] = {
        "covers": covers,
        "seconds": seconds,
        "rounding_s": list(map(_rounding_s, latencies.cells, rates.cells, seconds)),
        "batch_size": batches,
        "prompt_len": prompts,
        # What lies in the cache counts where no prompt was run.
        "context_len": column("context_len").where([not prompt for prompt in prompts]).wholes_told(0),
        "new_tokens": news,
        "repeats": [repeats or 0 for repeats in column("repeats").wholes_told(1)],
        "notes": [() if phase or not new else _UNNAMED for phase, new in zip(phases, news, strict=True)],
    }
    return ForeignFile("", "table", Table(Figure, columns))


def _tokens(covers: Covers, batch: int, prompt: int | None, new: int | None) -> int:
    return batch * ((prompt or 0) if covers == "prefill" else 1 if covers == "decode" else new or 0)


def _seconds(latencies: _Column, rates: _Column, tokens: Sequence[int]) -> list[float]:
    """The times, told or by the rate."""
    told = [bool(cell) for cell in latencies.cells]
    seconds = iter(latencies.only(told).positive())
    per_s = iter(rates.only([not each for each in told]).positive())
    return [next(seconds) if has else each / next(per_s) for has, each in zip(told, tokens, strict=True)]


def _rounding_s(latency: Any, rate: Any, seconds: float) -> float:
    """Half of the last printed digit's unit, as a time."""
    return half_a_unit(latency) if latency else seconds * half_a_unit(rate) / float(rate)


@dataclass(frozen=True)
class _Column:
    """The cells of a column, each with the number of its row in the file."""

    name: str
    rows: Sequence[int]
    cells: Sequence[Any]

    def only(self, chosen: Sequence[bool]) -> _Column:
        """Without the others' cells."""
        return _Column(self.name, [*compress(self.rows, chosen)], [*compress(self.cells, chosen)])

    def where(self, chosen: Sequence[bool]) -> _Column:
        """With the others' cells empty."""
        cells = [cell if has else None for cell, has in zip(self.cells, chosen, strict=True)]
        return _Column(self.name, self.rows, cells)

    def positive(self) -> list[float]:
        return self._numbers(float, math.ulp(0.0), lambda cell: number_of(cell, self.name))

    def wholes(self, least: int) -> list[int]:
        return self._numbers(int, least, lambda cell: whole_of(cell, self.name, least))

    def wholes_told(self, least: int) -> list[int | None]:
        """None where a cell is empty."""
        told = [bool(cell) for cell in self.cells]
        if all(told):
            return [*self.wholes(least)]
        numbers = iter(self.only(told).wholes(least))
        return [next(numbers) if has else None for has in told]

    def _numbers(
        self, quick: Callable[[Any], _Number], least: float, careful: Callable[[object], _Number]
    ) -> list[_Number]:
        """Of plain texts in one go, else cell by cell, which tells the row that is broken."""
        found: list[_Number] = []
        with contextlib.suppress(ValueError):
            found = list(map(quick, self.cells)) if set(map(type, self.cells)) == {str} else []
        if found and all(map(math.isfinite, found)) and least <= min(found) and max(found) < _LARGEST:
            return found
        found = []
        for number, cell in zip(self.rows, self.cells, strict=True):
            try:
                found.append(careful(cell))
            except RequestError as error:
                raise RequestError(f"row {number}: {error}") from None
        return found
