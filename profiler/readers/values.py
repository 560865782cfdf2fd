"""Numbers, texts and settings from the values of a file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from profiler.errors import RequestError

Record = Mapping[str, Any]
"""One JSON object, or one row of a table."""
Settings = tuple[tuple[str, str], ...]
"""Pairs of a name and a value, as texts."""

_LONGEST_TEXT = 200
_THOUSANDS = re.compile(r"\s*\d{1,3}(?:,\d{3})+(?:\.\d*)?\s*")


def number_of(value: object, what: str) -> float:
    """`value`, a number or a text, as a positive finite number. Raises RequestError naming `what`."""
    number = _float_of(value, what)
    if isinstance(value, bool) or not math.isfinite(number) or number <= 0:
        raise RequestError(f"{what} is not a positive number: {escaped(value)}.")
    return number


def whole_of(value: object, what: str, least: int = 0) -> int:
    """`value`, a number or a text, as an integer of at least `least`. Raises RequestError naming `what`."""
    number = _float_of(value, what)
    if not number.is_integer() or not least <= number < 2**53:
        raise RequestError(f"{what} is not an integer of at least {least}: {escaped(value)}.")
    return int(number)


def _float_of(value: object, what: str) -> float:
    if value is None:
        raise RequestError(f"{what} is missing.")
    if isinstance(value, str) and _THOUSANDS.fullmatch(value):
        value = value.replace(",", "")
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{what} is not a number: {escaped(value)}.") from None


def samples_of(values: object, what: str, scale: float = 1.0) -> tuple[float, ...]:
    """A list of positive numbers times `scale`, in seconds; empty if `values` is not a list.

    Raises RequestError naming `what` for anything else in the list.
    """
    return tuple(number_of(value, what) * scale for value in values) if isinstance(values, list) else ()


def inner(record: Record, *names: str) -> Any:
    """The value at a path of keys in nested mappings; None if there is none."""
    value: Any = record
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def texts(named: Mapping[str, object]) -> dict[str, str]:
    """Settings as short texts, without those that are None or empty."""
    return {name: escaped(value).strip() for name, value in named.items() if value not in (None, "")}


def apart(rows: Sequence[Mapping[str, object]]) -> tuple[dict[str, str], list[Settings]]:
    """Split the settings of a file's rows: (those that all rows share, for each row those that differ between rows)."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [_setting(row.get(name)) for row in rows] for name in names}
    shared = {name: texts[0] for name, texts in columns.items() if texts[0] and len(set(texts)) == 1}
    differing = [(name, texts) for name, texts in columns.items() if len(set(texts)) > 1]
    return shared, [tuple((name, texts[at] or "-") for name, texts in differing) for at in range(len(rows))]


def _setting(value: object) -> str:
    """A setting as a short text, booleans as 0 or 1, since formats differ between `true` and 1."""
    return "" if value is None else escaped(int(value) if isinstance(value, bool) else value).strip()


def half_a_unit(text: object) -> float:
    """Half a unit of the last digit of a printed number: 0.05 for `99.9`, 0.5 for `120`; 0 if `text` is not a str."""
    if not isinstance(text, str):
        return 0.0
    digits, _, power = text.strip().lower().partition("e")
    decimals = len(digits.partition(".")[2])
    return 0.5 * 10.0 ** (int(power or 0) - decimals)


def escaped(value: object) -> str:
    """Any value as one short line of printable text."""
    text = "".join(sign if sign.isprintable() else " " for sign in str(value)[: 2 * _LONGEST_TEXT])
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "..."
