"""The screen: a hundred columns, colours only where they help, and plain ASCII where that is asked for."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from rich.console import Console

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
