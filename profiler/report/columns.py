"""The columns of a run's cells: those that tables show, those that exports have, and the formats of exports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from profiler.judge.cells import SHOWN, CellResult
from profiler.report.blocks import HTML, MEDIA, TERMINAL, Medium
from profiler.report.selection import half_width
from profiler.store.folder import Run
from profiler.units import duration, percent, scaled, significant

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Column:
    """One column of a table of cells: its heading, its value, and how a number is shown."""

    heading: str
    value: Callable[[CellResult], str | int | float | None]
    show: Callable[[float], str] | None = None
    media: frozenset[Medium] = MEDIA
    """Whose tables have it."""

    def entry(self, result: CellResult) -> Entry:
        value = self.value(result)
        number = self.show is not None or isinstance(value, int)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return Entry("-", "", number)
        return Entry(self.show(float(value)) if self.show else str(value), value, number)


@dataclass(frozen=True)
class Entry:
    text: str
    sort: str | int | float
    """The value to sort by; empty if there is no value."""
    number: bool


_UNITS: dict[str, Callable[[float], str]] = {
    "s": duration,
    "share": percent,
    "tokens/s": significant,
    "1/s": lambda per_s: scaled(per_s, "").rstrip(),
    "bytes": lambda value: scaled(value, "B"),
}
_FIRST = (
    "phase", "batch x tokens", "engine", "batch", "prompt", "context", "status", "time", "±", "repetitions", "p99",
    "TTFT", "tok/s", "FLOP/s", "B/s", "MFU", "MBU", "% ceiling", "memory",
)  # fmt: skip
"""The headings that come first, in their order; the others follow in that of cells.csv."""


def _columns() -> Iterator[Column]:
    yield Column("batch x tokens", lambda row: f"{row.phase} {row.batch_size} x {row.key.cell.depth}", media=TERMINAL)
    yield Column("±", half_width, lambda width: percent(width) if width >= 0.1 else f"{100 * width:.1f} %")
    for name, shown in SHOWN.items():
        if shown.heading:
            media = MEDIA if shown.on_screens else HTML
            yield Column(shown.heading, attrgetter(name), _UNITS.get(shown.unit), media)


COLUMNS = tuple(sorted(_columns(), key=lambda item: (*_FIRST, item.heading).index(item.heading)))


def columns_with_values(run: Run, medium: Medium) -> list[Column]:
    """Return the columns of a medium with a value in some row.

    The engine is left out if all rows have the same, and memory on a CPU: the process's peak belongs to no cell.
    """
    is_one_engine, is_cpu = len({result.engine for result in run.results}) == 1, run.document.device.kind == "cpu"
    omitted = {"engine": is_one_engine, "memory": is_cpu}
    filled = [column for column in COLUMNS if any(column.entry(result).sort != "" for result in run.results)]
    return [column for column in filled if medium in column.media and not omitted.get(column.heading)]


def tokens_table(run: Run) -> pd.DataFrame:
    """Return the exported columns of every cell and phase: numbers, with units in the names of the columns."""
    return run.cells[[name for name, shown in SHOWN.items() if shown.is_exported]]


_ESCAPED = str.maketrans({"<": "&lt;", **{sign: f"\\{sign}" for sign in "\\|[]`"}})
"""In Markdown a text starts no element, link, picture or code, and ends no cell of a table."""


def _markdown(frame: pd.DataFrame) -> bytes:
    cells = frame.map(lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)).replace("nan", "")
    rows = [list(frame.columns), ["---"] * len(frame.columns), *cells.to_numpy().tolist()]
    return "".join(f"| {' | '.join(cell.translate(_ESCAPED) for cell in row)} |\n" for row in rows).encode()


EXPORTERS: dict[str, Callable[[pd.DataFrame], bytes]] = {
    "csv": lambda frame: frame.to_csv(index=False).encode(),
    "md": _markdown,
    "json": lambda frame: f"{frame.to_json(orient='records', indent=2, double_precision=15)}\n".encode(),
    "parquet": lambda frame: frame.to_parquet(index=False),
    "latex": lambda frame: frame.to_latex(index=False, escape=True, float_format="%.4g", na_rep="").encode(),
}
"""The formats of `roofscope export`."""
