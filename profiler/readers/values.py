"""Numbers, texts and settings from the values of a file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from profiler.errors import RequestError

Record = Mapping[str, Any]
"""One JSON object, or one row of a table."""
Settings = tuple[tuple[str, str], ...]
"""Pairs of a name and a value, as texts."""

_LONGEST_TEXT = 200
# Windows' PowerShell 5 redirects `±` as the two signs that its bytes are in code page 437 or 1252.
_PLUS_MINUS = r"(?:±|\+/?-|┬▒|Â±)"
_THOUSANDS = r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?"
_DIGITS = rf"{_THOUSANDS}|[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_NUMBER = re.compile(rf"(?P<mean>{_DIGITS})(?:\s*{_PLUS_MINUS}\s*(?P<spread>{_DIGITS}))?\s*(?P<unit>[^\d\s±+-]\S*)?")
# Units that tools and people write after a number, with their factors.
SECONDS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
PER_SECOND = dict.fromkeys(("t/s", "tok/s", "tokens/s"), 1.0)
BYTES = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# What names a model, in order of preference.
_OF_MODEL = ("precision", "model's name", "size", "params", "model_size", "parameters")


@dataclass(frozen=True, slots=True)
class Measured:
    """A positive number with what a file says about its precision."""

    value: float
    spread: float = 0.0
    """Standard deviation of the repetitions; 0 if the file does not say. Tools divide by n or by n - 1."""
    rounding: float = 0.0
    """Half a unit of the last digit that is printed."""
    values: tuple[float, ...] = ()
    """Each repetition, if the file has them."""
    repeats: int = 0
    """Number of repetitions; 0 if the file does not say."""
    half_width: float = 0.0
    """Half width of the 95 % interval, if a clock is coarser than the repetitions tell."""

    def times(self, factor: float) -> Measured:
        """The number and all that belongs to it, multiplied."""
        names = ("value", "spread", "rounding", "half_width")
        scaled: dict[str, Any] = {name: factor * getattr(self, name) for name in names}
        return replace(self, values=tuple(factor * value for value in self.values), **scaled)

    def of(self, amount: float) -> Measured:
        """`amount` divided by this rate: seconds for tokens. Spread and rounding keep their share."""
        values = tuple(amount / value for value in self.values)
        return replace(self.times(amount / self.value / self.value), values=values)


def measured(
    value: object, what: str, units: Mapping[str, float] | None = None, *, values: object = None, spread: object = None
) -> Measured:
    """`value`, a number or a text such as `8,521.08 ± 69.61 t/s`, whose unit must be one of `units`.

    `values` are its repetitions and `spread` their standard deviation, if the file has them elsewhere. Raises
    RequestError naming `what` for anything else, or if the number is not positive and finite.
    """
    found = _NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = (found["unit"] if found else None) or ""
    if isinstance(value, bool) or (unit and unit not in (units or {})):
        raise RequestError(f"{what} is not a number: {escaped(value)}.")
    factor = (units or {}).get(unit, 1.0)
    number = factor * _plain(found["mean"] if found else value, what)
    if not math.isfinite(number) or number <= 0:
        raise RequestError(f"{what} is not a positive number: {escaped(value)}.")
    deviation = factor * _plain((found["spread"] if found else None) or spread or 0.0, what)
    each = tuple(number_of(item, what) for item in values) if isinstance(values, list) else ()
    # Half a unit of the last digit of a printed number: 0.05 for `99.9`, 0.5 for `120`.
    digits, _, power = found["mean"].lower().partition("e") if found else ("", "", "")
    rounding = 0.5 * 10.0 ** (int(power or 0) - len(digits.partition(".")[2])) if found else 0.0
    return Measured(number, deviation if not each else 0.0, factor * rounding, each, len(each))


def _plain(value: object, what: str) -> float:
    if value is None:
        raise RequestError(f"{what} is missing.")
    if isinstance(value, str) and re.fullmatch(_THOUSANDS, value.strip()):
        value = value.replace(",", "")
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{what} is not a number: {escaped(value)}.") from None


def number_of(value: object, what: str) -> float:
    """`value`, a number or a text, as a positive finite number. Raises RequestError naming `what`."""
    return measured(value, what).value


def whole_of(value: object, what: str, least: int = 0) -> int:
    """`value`, a number or a text, as an integer of at least `least`. Raises RequestError naming `what`."""
    number = _plain(value, what)
    if not number.is_integer() or not least <= number < 2**53:
        raise RequestError(f"{what} is not an integer of at least {least}: {escaped(value)}.")
    return int(number)


def inner(record: object, path: str) -> Any:
    """The value at a path of keys, such as `metrics.latency.median`; None if there is none.

    `*` is any key. Of a list of mappings it is the list of their values.
    """
    value = record
    for name in path.split("."):
        if isinstance(value, list):
            value = [found for item in value if (found := inner(item, name)) is not None]
        elif not isinstance(value, Mapping):
            return None
        else:
            value = list(value.values()) if name == "*" else value.get(name)
    return value


def has(record: Record, paths: str) -> bool:
    """Whether a record has a key at one of `paths`, which have ` | ` between them, whatever its value."""
    for parent, _, name in (path.rpartition(".") for path in paths.split(" | ")):
        found = inner(record, parent) if parent else record
        if any(isinstance(item, Mapping) and name in item for item in (found if isinstance(found, list) else [found])):
            return True
    return False


def first_of(record: Record, paths: str) -> Any:
    """The first value at one of `paths` that is not empty; None without one."""
    return next(
        (value for path in paths.split(" | ") if (value := inner(record, path)) not in (None, "", [], {})), None
    )


def number_at(record: Record, paths: str) -> float | None:
    """The first positive number at one of `paths`; None if all are missing or 0, which tools write for "not measured".

    `a / b` is the ratio of two numbers. Raises RequestError naming the path of anything else.
    """
    for path in paths.split(" | "):
        path, _, divisor = path.partition(" / ")
        value = inner(record, path)
        if value not in (None, "") and _plain(value, path):
            return number_of(value, path) / (needed(record, divisor) if divisor else 1.0)
    return None


def needed(record: Record, paths: str) -> float:
    """The same; raises RequestError naming the first path if there is no number."""
    number = number_at(record, paths)
    first = re.split(r" [|/] ", paths)[0]
    return number_of(inner(record, first), first) if number is None else number


def whole_at(record: Record, paths: str, least: int = 1) -> int | None:
    """The first value at one of `paths` as an integer; None if all are missing. Raises RequestError if it is none."""
    value = first_of(record, paths)
    return None if value is None else whole_of(value, paths.rpartition(".")[2], least)


def apart(rows: Sequence[Mapping[str, object]]) -> tuple[dict[str, str], list[Settings]]:
    """Split the settings of a file's rows: (those that all rows share, for each row those that differ between rows).

    Of what names a model, the first setting that distinguishes all models is enough.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [_setting(row.get(name)) for row in rows] for name in names}
    shared = {name: column[0] for name, column in columns.items() if column[0] and len(set(column)) == 1}
    differing = {name: column for name, column in columns.items() if len(set(column)) > 1}
    of_model = [name for name in _OF_MODEL if name in differing]
    models = len(set(zip(*(differing[name] for name in of_model), strict=True)))
    enough = next((name for name in of_model if len(set(differing[name])) == models), None)
    kept = {name: column for name, column in differing.items() if enough in (None, name) or name not in of_model}
    return shared, [tuple((name, column[at] or "-") for name, column in kept.items()) for at in range(len(rows))]


def _setting(value: object) -> str:
    """A setting as a short text: booleans as 0 or 1, since formats differ, and each item of a list once."""
    items = value if isinstance(value, list) else [value]
    texts = [escaped(int(item) if isinstance(item, bool) else item).strip() for item in items]
    return ", ".join(text for text in dict.fromkeys(texts) if text != "None")


def escaped(value: object) -> str:
    """Any value as one short line of printable text."""
    text = "".join(sign if sign.isprintable() else " " for sign in str(value)[: 2 * _LONGEST_TEXT])
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "..."
