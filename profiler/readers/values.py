"""Numbers, texts and settings from the values of a file."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from profiler.errors import RequestError

Record = Mapping[str, Any]
"""One JSON object, or one row of a table."""
Settings = tuple[tuple[str, str], ...]
"""Pairs of a name and a value, as texts."""

# Consoles in another encoding show other signs for `±`, and its byte in theirs is none of UTF-8.
_PLUS_MINUS = re.compile(r"±|\+/?-|\s[^\x00-\x7f–—]{1,3}\s")
_LONGEST_TEXT = 200
# No time, rate, size or count is outside of these.
_LEAST, _MOST = 1e-18, 1e15
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

    def times(self, factor: float) -> Self:
        """The number and all that belongs to it, multiplied."""
        return replace(
            self,
            value=factor * self.value,
            spread=factor * self.spread,
            rounding=factor * self.rounding,
            values=tuple(factor * value for value in self.values),
        )

    def of(self, amount: float) -> Self:
        """`amount` divided by this rate: seconds for tokens. Spread and rounding keep their share."""
        values = tuple(amount / value for value in self.values)
        return replace(self.times(amount / self.value / self.value), values=values)


def measured(value: object, what: str, *, values: object = None, spread: object = None) -> Measured:
    """`value`, a number or a text such as `8521.08 ± 69.61`.

    `values` are its repetitions and `spread` their standard deviation, if the file has them elsewhere. Raises
    RequestError naming `what` for anything else, or if the number is not positive and finite.
    """
    mean, *printed = _PLUS_MINUS.split(value) if isinstance(value, str) else (value,)
    number = number_of(mean, what)
    if isinstance(values, list) and values:
        each = tuple(number_of(item, what) for item in values)
        return Measured(number, values=each, repeats=len(each))
    # Half a unit of the last digit of a printed number: 0.05 for `99.9`, 0.5 for `120`.
    digits, _, power = mean.strip().lower().partition("e") if isinstance(mean, str) else ("", "", "")
    rounding = 0.5 * 10.0 ** (int(power or 0) - len(digits.partition(".")[2])) if digits else 0.0
    return Measured(number, number_of((printed[0] if printed else spread) or 0.0, what, 0.0), rounding)


def number_of(value: object, what: str, least: float = _LEAST) -> float:
    """`value`, a number or a text, as a number of a size that can be measured. Raises RequestError naming `what`."""
    if value in (None, ""):
        raise RequestError(f"{what} is missing.")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number < _MOST:
        hint = "; write numbers without thousands separators" if "," in str(value) else ""
        raise RequestError(f"{what} is not a number from {least:g} to {_MOST:g}: {escaped(value).strip()}{hint}.")
    return number


def whole_of(value: object, what: str, least: int = 0) -> int:
    """`value`, a number or a text, as an integer of at least `least`. Raises RequestError naming `what`."""
    number = number_of(value, what, least)
    if not number.is_integer():
        raise RequestError(f"{what} is not an integer: {escaped(value)}.")
    return int(number)


def inner(record: object, path: str) -> Any:
    """The value at a path of keys, such as `metrics.latency.median`, or at a key with this name; None if there is none.

    Of a list of mappings it is the list of their values.
    """
    if isinstance(record, Mapping) and path in record:
        return record[path]
    value = record
    for name in path.split("."):
        if isinstance(value, list):
            value = [found for item in value if (found := inner(item, name)) not in (None, [])]
        elif not isinstance(value, Mapping):
            return None
        else:
            value = value.get(name)
    return value


def has(record: Record, paths: str) -> bool:
    """Whether a record has a value, even an empty text, at one of `paths`, which have ` | ` between them."""
    return any(inner(record, path) not in (None, []) for path in paths.split(" | "))


def first_of(record: Record, paths: str) -> Any:
    """The first value at one of `paths` that is not empty; None without one."""
    values = (inner(record, path) for path in paths.split(" | "))
    return next((value for value in values if value not in (None, "", [], {})), None)


def number_at(record: Record, paths: str) -> float | None:
    """The first positive number at one of `paths`; None if all are missing or 0, which tools write for "not measured".

    `a / b` is the ratio of two numbers. Raises RequestError naming the path of anything else.
    """
    for path in paths.split(" | "):
        path, _, divisor = path.partition(" / ")
        value = inner(record, path)
        if value not in (None, "") and number_of(value, path, 0.0):
            return number_of(value, path) / (needed(record, divisor) if divisor else 1.0)
    return None


def needed(record: Record, paths: str) -> float:
    """The same; raises RequestError naming the last path if there is no number."""
    if (number := number_at(record, paths)) is None:
        raise RequestError(f"{paths.rpartition(' | ')[2]} is missing.")
    return number


def whole_at(record: Record, paths: str, least: int = 1) -> int | None:
    """The first value at one of `paths` as an integer; None if all are missing. Raises RequestError if it is none."""
    value = first_of(record, paths)
    return None if value is None else whole_of(value, paths.partition(" | ")[0], least)


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
