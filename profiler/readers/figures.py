"""The figures that every reader returns, and their checks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from profiler.errors import RequestError
from profiler.grid.cells import Phase
from profiler.readers.columns import Table

Covers = Literal["prefill", "decode", "generate"]
"""What a time covers: a whole prompt, one decode step, or both together."""
Settings = tuple[tuple[str, str], ...]
"""Names and values, as texts."""

_LONGEST_TEXT = 200
# A nanosecond to thirty years, a billion sequences or tokens, 64 bytes a weight: beyond them a file is damaged.
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9
_LARGEST = 10**9
_WIDEST_BYTES = 64.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of another tool. Shapes that its file does not name are None."""

    covers: Covers
    seconds: float
    """Of the whole prompt, of one decode step, or of prompt and decode loop together."""
    batch_size: int | None = None
    prompt_len: int | None = None
    context_len: int | None = None
    """Tokens in the cache before the prompt, or before the first decode step where no prompt was run."""
    new_tokens: int | None = None
    samples_s: tuple[float, ...] = ()
    """Seconds of each repetition, where the file keeps them."""
    half_width_s: float = 0.0
    """Of its 95 % interval, or of one repetition's where nobody tells how many there were; 0 without a spread."""
    rounding_s: float = 0.0
    """Half a unit of the last digit that the file prints: nearer than this it is not known."""
    requests: int | None = None
    """Requests that shared `seconds`, where the time is not one batch's."""
    repeats: int = 0
    """How often it was measured; 0 where the file does not say."""
    chunk_tokens: int | None = None
    """Tokens of a prompt that are processed at a time, so that weights are read once for each chunk."""
    weight_bytes: float | None = None
    """Bytes a parameter as stored, where the file tells what the weights take."""
    params: int | None = None
    """The model's parameters, where the file tells them."""
    kv_itemsize: float | None = None
    """Bytes an element of the cache, keys and values together."""
    cap: int | None = None
    """Sequences that were allowed at a time, where `batch_size` is how many there really were."""
    step_tokens: float = 1.0
    """Tokens that a decode step gives each sequence: more than one by speculation."""
    loop_tokens: int | None = None
    """Tokens of all sequences where `seconds` are those of a whole decode loop; 0 where the file does not tell them."""
    on_host: bool = False
    """Whether no layer lay on the card."""
    settings: Settings = ()
    """What it was measured with, as far as that differs from other figures of its file."""
    notes: tuple[str, ...] = ()
    """What is to be known of the figure before it is believed."""

    @property
    def has_step(self) -> bool:
        """Whether it is about a prefill or a decode step alone, of a known shape."""
        alone = self.covers != "generate" and self.loop_tokens is None
        return alone and self.batch_size is not None and self.depth is not None

    @property
    def depth(self) -> int | None:
        """Tokens in the cache when decoding begins, or those of the prompt."""
        known = [length for length in (self.prompt_len, self.context_len) if length is not None]
        return sum(known) if known else None

    @property
    def step_phase(self) -> Phase:
        return "prefill" if self.covers == "prefill" else "decode"

    @property
    def tokens(self) -> int | None:
        """New tokens that the time went into: those of the prompts, or those that were generated."""
        each = self.prompt_len if self.covers == "prefill" else 1 if self.covers == "decode" else self.new_tokens
        return None if each is None or self.batch_size is None else each * self.batch_size

    def of_one_batch(self) -> Figure:
        """The time of one batch, where the file tells that of many requests: as many at a time as the batch holds."""
        if self.requests is None or self.batch_size is None:
            return self
        batch_size = min(self.batch_size, self.requests)
        return replace(self, seconds=self.seconds * batch_size / self.requests, batch_size=batch_size, requests=None)

    def with_shapes(self, prompt_len: int | None, batch_size: int | None, new_tokens: int | None) -> Figure:
        """With the given shapes where the file names none."""
        if prompt_len is batch_size is new_tokens is None:
            return self
        return replace(
            self,
            prompt_len=prompt_len if self.prompt_len is None and self.context_len is None else self.prompt_len,
            batch_size=batch_size if self.batch_size is None else self.batch_size,
            new_tokens=new_tokens if self.new_tokens is None else self.new_tokens,
        ).by_step()

    def by_step(self) -> Figure:
        """The time of one step, where it is that of a whole decode loop and the shapes tell how many steps that has:
        the tokens behind the first. Raises RequestError for shapes that are not those of the loop."""
        if self.loop_tokens is None or self.batch_size is None or not (self.new_tokens or self.loop_tokens):
            return self
        steps = self.new_tokens - 1 if self.new_tokens else self.loop_tokens // self.batch_size
        if steps < 1 or (self.loop_tokens and steps * self.batch_size != self.loop_tokens):
            raise RequestError(
                f"its decode loop made {self.loop_tokens} tokens behind the first of each sequence: not those of"
                f" {self.batch_size} sequences" + (f" and {self.new_tokens} new tokens." if self.new_tokens else ".")
            )
        return replace(
            self,
            seconds=self.seconds / steps,
            samples_s=tuple(value / steps for value in self.samples_s),
            new_tokens=steps + 1,
            loop_tokens=None,
        )


Figures = Table[Figure]


def figures_of(rows: Iterable[Figure]) -> Figures:
    """Some figures, one by one."""
    return Table.of(Figure, rows)


@dataclass(frozen=True)
class ForeignFile:
    """One file of another tool."""

    name: str
    tool: str
    figures: Figures
    created: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What it says of the model, the device and the software, by the names that a comparison uses."""


_SIZES = ("batch_size", "prompt_len", "context_len", "new_tokens")


def refuse_impossible(figures: Figures) -> None:
    """Raises RequestError for the first figure that is none of a machine."""
    seconds, widths = figures.numbers("seconds"), figures.numbers("weight_bytes")
    doubtful = ~((seconds >= _SHORTEST_S) & (seconds <= _LONGEST_S)) | (widths > _WIDEST_BYTES)
    for name in _SIZES:
        doubtful |= figures.numbers(name) > _LARGEST
    for name in ("samples_s", "half_width_s"):
        doubtful |= figures.told(name)
    for index in np.flatnonzero(doubtful).tolist():
        try:
            _refuse_impossible(figures[index])
        except RequestError as error:
            raise RequestError(f"figure {index + 1} is damaged: {error}") from None


def _refuse_impossible(figure: Figure) -> None:
    for seconds in (figure.seconds, *figure.samples_s):
        if not _SHORTEST_S <= seconds <= _LONGEST_S:
            raise RequestError(f"{seconds:.3g} s is no time that a {figure.covers} takes.")
    if not 0 <= figure.half_width_s < math.inf:
        raise RequestError(f"{figure.half_width_s:.3g} s is no spread of times.")
    for size in (getattr(figure, name) for name in _SIZES):
        if size is not None and size > _LARGEST:
            raise RequestError(f"{escaped(size)} is no number of sequences or tokens of a {figure.covers}.")
    if figure.weight_bytes is not None and figure.weight_bytes > _WIDEST_BYTES:
        raise RequestError(f"no weight is stored in {figure.weight_bytes:.3g} bytes.")


def seconds_of(value: object, what: str, scale: float = 1.0) -> float:
    """A positive finite number of seconds. Raises RequestError naming `what` for anything else."""
    return number_of(value, what) * scale


def number_of(value: object, what: str) -> float:
    """A positive finite number, also where it was written as text. Raises RequestError naming `what`."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{what} is no number: {escaped(value)}.") from None
    if isinstance(value, bool) or not math.isfinite(number) or number <= 0:
        raise RequestError(f"{what} is no positive number: {escaped(value)}.")
    return number


def whole_of(value: object, what: str, least: int = 0) -> int:
    """A whole number of at least `least`. Raises RequestError naming `what`."""
    if type(value) is str and value.isdecimal() and len(value) < 16 and int(value) >= least:
        return int(value)  # as nearly all of a table's are written
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{what} is no number: {escaped(value)}.") from None
    if not number.is_integer() or not least <= number < 2**53:
        raise RequestError(f"{what} is no whole number of {least} or more: {escaped(value)}.")
    return int(number)


def samples_of(values: object, what: str, scale: float = 1.0) -> tuple[float, ...]:
    """A list of positive times in seconds; nothing where there is no list. Raises RequestError naming `what`."""
    if not isinstance(values, list):
        return ()
    return tuple(seconds_of(value, what, scale) for value in values)


def inner(record: Mapping[str, Any], *names: str) -> Any:
    """The value under a path of names, or None where there is none."""
    value: Any = record
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def texts(named: Mapping[str, object]) -> dict[str, str]:
    """Settings as short texts, without those that a file does not tell."""
    return {name: escaped(value).strip() for name, value in named.items() if value not in (None, "")}


def apart(rows: Sequence[Mapping[str, object]]) -> tuple[dict[str, str], list[Settings]]:
    """What all rows of a file tell alike, and what each of them tells otherwise than another does."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [_told(row.get(name)) for row in rows] for name in names}
    alike = {name: texts[0] for name, texts in columns.items() if texts[0] and len(set(texts)) == 1}
    differing = [(name, texts) for name, texts in columns.items() if len(set(texts)) > 1]
    return alike, [tuple((name, texts[at]) for name, texts in differing) for at in range(len(rows))]


def _told(value: object) -> str:
    """A setting as a short text: one format writes `true`, another 1."""
    return "" if value is None else escaped(int(value) if isinstance(value, bool) else value).strip()


def half_a_unit(text: object) -> float:
    """Half of the last digit's unit of a number as it is printed: 0.05 of `99.9`, 0.5 of `120`; 0 of no text."""
    if not isinstance(text, str):
        return 0.0
    digits, _, power = text.lower().partition("e")
    decimals = len(digits.partition(".")[2])
    return 0.5 * 10.0 ** (int(power or 0) - decimals)


def escaped(value: object) -> str:
    """Anything that a file holds as one short line of printable text."""
    text = "".join(sign if sign.isprintable() else " " for sign in str(value)[: 2 * _LONGEST_TEXT])
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "..."


def middle_s(samples_s: Sequence[float]) -> float:
    """The median of some times."""
    ordered = sorted(samples_s)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
