"""The console of all commands, and a table of at most 200 rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 100
_ASCII = str.maketrans({"─": "-", "━": "-", "±": "~", "…": ".", "│": "|"})


class _Ascii:
    """A stream that replaces box drawing and typographic signs with ASCII."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text.translate(_ASCII))

    def flush(self) -> None:
        self._stream.flush()


def screen(*, plain: bool = False, stream: TextIO | None = None) -> Console:
    """Return a console on `stream` (default: standard output), 100 columns wide or as narrow as the terminal.

    `plain` prints neither colour nor box drawing. Markup is off, since a model's name may contain brackets. Rich itself
    drops colours for NO_COLOR and for pipes.
    """
    default = Console(file=stream)
    width = min(WIDTH, default.width) if default.is_terminal else WIDTH
    if plain:
        ascii_stream: Any = _Ascii(stream or sys.stdout)
        return Console(file=ascii_stream, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    return Console(file=stream, width=width, markup=False, emoji=False)


MOST_ROWS = 200
"""Rows of a table on the screen; later rows are omitted."""
_WRAPPED = ("moved, or why not", "ran with")
COLORS = {"slower": "red", "faster": "green", "SLOWER": "red", "pass": "green"}


def long_table(columns: Sequence[str], rows: Sequence[Sequence[str]], of: int | None = None) -> Table:
    """Return a table of at most `MOST_ROWS` rows; `of` is the total row count where `rows` has only the first."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        words = name in (*_WRAPPED, "cell", "verdict", "gate", "what", "by", "regime", "where")
        table.add_column(name, justify="left" if words else "right", no_wrap=name not in _WRAPPED)
    shown = rows[:MOST_ROWS]
    for row in shown:
        table.add_row(*(Text(text, style=COLORS.get(text, "")) for text in row))
    if left := (of or len(rows)) - len(shown):
        table.caption = f"{left} more rows: --format json has them all"
    return table
