"""One console for all screens, and a table of at most a few hundred rows."""

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
    """A stream that spells lines and signs in ASCII."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text.translate(_ASCII))

    def flush(self) -> None:
        self._stream.flush()


def screen(*, plain: bool = False, stream: TextIO | None = None) -> Console:
    """A stream (standard output), 100 columns wide or as narrow as the terminal; `plain` knows neither colour nor box
    drawing.

    What is printed is text: brackets in a model's name are no styles. Rich itself drops colours for NO_COLOR and for
    pipes.
    """
    own = Console(file=stream)
    width = min(WIDTH, own.width) if own.is_terminal else WIDTH
    if plain:
        spelled: Any = _Ascii(stream or sys.stdout)
        return Console(file=spelled, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    return Console(file=stream, width=width, markup=False, emoji=False)


MOST_ROWS = 200
"""A table on the screen shows so many rows, the first."""
_WRAPPED = ("moved, or why not", "ran with")
COLORS = {"slower": "red", "faster": "green", "SLOWER": "red", "pass": "green"}


def long_table(columns: Sequence[str], rows: Sequence[Sequence[str]], of: int | None = None) -> Table:
    """A table of some columns, of the first rows where there are many: `rows` may be the first of so many."""
    found = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        words = name in (*_WRAPPED, "cell", "verdict", "gate", "what", "by", "regime", "where")
        found.add_column(name, justify="left" if words else "right", no_wrap=name not in _WRAPPED)
    shown = rows[:MOST_ROWS]
    for row in shown:
        found.add_row(*(Text(text, style=COLORS.get(text, "")) for text in row))
    if left := (of or len(rows)) - len(shown):
        found.caption = f"{left} more rows: --format json has them all"
    return found
