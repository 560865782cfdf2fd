"""Numbers and texts in readable form; all other code uses seconds, bytes and FLOPs."""

import math
import re
from collections.abc import Callable
from typing import Any

_UNIT = re.compile(r"(?<=\d) (?=(?:%|[kMGTPmnuµ]?(?:B|s|FLOPs?|tok|tokens?)(?:/\w+)?|[kMGTP])(?![\w]))")
_UTC = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\d(?:\.\d+)?(?:\+00:00|Z)")
_ROUNDS_UP = 0.9995
"""From this share of a larger unit on, three digits of the smaller one would be 1000."""
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def scaled(value: float, unit: str, digits: int = 3) -> str:
    """Return a value with a decimal prefix, as in datasheets: `4.3e12, "B/s"` -> `4.3 TB/s`."""
    for size, prefix in _PREFIXES:
        if abs(value) >= _ROUNDS_UP * size:
            return f"{significant(value / size, digits)} {prefix}{unit}"
    return f"{significant(value, digits)} {unit}"


def short_count(value: float) -> str:
    """Return a count as for parameters, in thousands, millions or billions: `7241732096` -> `7.24 B`."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{significant(value / size)} {letter}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Return a time with its unit: `0.0035` -> `3.50 ms`; `-` for NaN."""
    if math.isnan(seconds):
        return "-"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= _ROUNDS_UP * size:
            return f"{significant(seconds / size, 3)} {unit}"
    return f"{significant(seconds / 1e-9, 3)} ns" if seconds else "0 s"


def saving(seconds: float) -> str:
    """Return `saves 3.2 ms`, or `costs 0.4 ms` for a negative saving."""
    return f"{'saves' if seconds >= 0 else 'costs'} {duration(abs(seconds))}"


def signed_duration(seconds: float) -> str:
    """Return a time with its sign and unit: `0.0021` -> `+2.10 ms`."""
    return f"{'-' if seconds < 0 else '+'}{duration(abs(seconds))}"


def time_left(seconds: float) -> str:
    """Return `about 1:35 left`, or that a part which has begun takes longer than planned."""
    whole = round(seconds)
    return f"about {whole // 60}:{whole % 60:02d} left" if whole > 0 else "later than planned"


def utc_minute(created: str) -> str:
    """Return `2026-11-23 13:39 UTC` for `2026-11-23T13:39:08+00:00`; any other text unchanged."""
    found = _UTC.fullmatch(created)
    return f"{found[1]} {found[2]} UTC" if found else created


def several(number: int, one: str, many: str) -> str:
    """Return a number with singular or plural: `1, "cell is", "cells are"` -> `1 cell is`; `2` -> `2 cells are`."""
    return f"{number} {one if number == 1 else many}"


def processors(number: int, kind: str) -> str:
    """Return a number of threads (CPU) or SMs (GPU): `1, "cpu"` -> `1 thread`; `40, "cuda"` -> `40 SMs`."""
    return several(number, "thread", "threads") if kind == "cpu" else several(number, "SM", "SMs")


def percent(share: float) -> str:
    """Return a share in percent: `0.923` -> `92 %`."""
    return f"{100 * share:z.0f} %"


def significant(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits, never in scientific notation: 1234, 12.3, 0.123."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def unbroken(text: str, space: str = "\u00a0") -> str:
    """Return a text with `space` between each number and its unit, so that no line ends there."""
    return _UNIT.sub(space, text)


def visible(text: str) -> str:
    """Return a text as one line that is safe to show: control signs become escapes, line ends and tabs spaces."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else " " if sign.isspace() else sign.encode("unicode_escape").decode()
        for sign in text
    )


def each_text(content: Any, change: Callable[[str], str]) -> Any:
    """Return parsed JSON with every text and key changed. Raises RecursionError if it is nested too deeply."""
    if isinstance(content, str):
        return change(content)
    if isinstance(content, dict):
        return {each_text(key, change): each_text(value, change) for key, value in content.items()}
    if isinstance(content, list):
        return [each_text(value, change) for value in content]
    return content
