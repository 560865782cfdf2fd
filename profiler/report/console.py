"""The console of all commands."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from rich.console import Console

WIDTH = 100
_LEAST = 40
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

    `COLUMNS` is a width of the user's own.

    `plain` prints neither colour nor box drawing. Markup is off, since a model's name may contain brackets. Rich omits
    colours for NO_COLOR and for pipes.
    """
    default = Console(file=stream)
    width = min(WIDTH, default.width) if default.is_terminal else WIDTH
    if (columns := os.environ.get("COLUMNS") or "").isdecimal():
        width = max(_LEAST, int(columns))
    if plain:
        ascii_stream: Any = _Ascii(stream or sys.stdout)
        return Console(file=ascii_stream, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    return Console(file=stream, width=width, markup=False, emoji=False)
