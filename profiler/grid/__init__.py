"""The cells to visit: prompt lengths x batch sizes, and the range grammar that names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from profiler.errors import GridError, RequestError
from profiler.grid.ragged import PADDED_ENGINE, RAGGED, Batch, Ragged, longest, parse_ragged, waiting

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)

MAX_VALUES = 1000
MOST = 10**7
"""Sequences, or tokens of one: no model's context is longer, and what is counted of more is no number of a machine."""
# Nobody means a number of more digits, and Python itself reads no more than some thousand.
_NUMBER = re.compile(r"\d{1,18}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})(?:([*+])(\d{1,18}))?")
_GRAMMAR = "use a number (128), a list (64,256), or a range (64..2048*2, 1..9+2)"
_LEAST_NEW_TOKENS = 4
DEFAULT_ENGINE = "eager"


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """One visit of the sweep: a batch of prompts of one length, prefilled and then decoded.

    With `context_len` instead of `prompt_len` the cache is filled directly, and only the decode is timed.
    """

    batch_size: int
    prompt_len: int
    new_tokens: int
    context_len: int = 0
    engine: str = DEFAULT_ENGINE

    @property
    def depth(self) -> int:
        """Tokens in the cache when decoding begins."""
        return self.prompt_len or self.context_len

    @property
    def slots(self) -> int:
        """Tokens that the cache of one sequence must hold at the end."""
        return self.depth + self.new_tokens

    @property
    def decode_steps(self) -> int:
        """Decode forwards: the first new token comes from the prefill itself."""
        return self.new_tokens - 1

    @property
    def keys(self) -> tuple[CellKey, ...]:
        """What is timed in it, phase by phase."""
        phases: tuple[Phase, ...] = PHASES if self.prompt_len else ("decode",)
        return tuple(CellKey(phase, self) for phase in phases)

    @property
    def name(self) -> str:
        """`4 x 128 (static)`: batch, depth, and the engine unless it is the plain one."""
        engine = "" if self.engine == DEFAULT_ENGINE else f" ({self.engine})"
        return f"{self.batch_size} x {self.depth}{engine}"


@dataclass(frozen=True, order=True, slots=True)
class CellKey:
    """One phase of one cell: what a figure is about. Its step is the whole prompt, or the decode loop's middle step."""

    phase: Phase
    cell: Cell

    @property
    def query_tokens(self) -> int:
        """New tokens a sequence in its step."""
        return self.cell.prompt_len if self.phase == "prefill" else 1

    @property
    def context_len(self) -> int:
        """Cached tokens at its step: a median over a decode loop describes the middle one."""
        return 0 if self.phase == "prefill" else self.cell.depth + self.cell.new_tokens // 2

    @property
    def tokens(self) -> int:
        """Tokens that its step processes."""
        return self.cell.batch_size * self.query_tokens

    @property
    def name(self) -> str:
        """`decode 1 x 64 (static)`."""
        return f"{self.phase} {self.cell.name}"

    @property
    def series(self) -> tuple[Phase, int, int, int, str]:
        """What keys have in common that differ by nothing but their batch."""
        cell = self.cell
        return self.phase, cell.prompt_len, cell.context_len, cell.new_tokens, cell.engine

    @classmethod
    def at(
        cls, phase: Phase, batch_size: int, prompt_len: int, context_len: int, new_tokens: int, engine: str
    ) -> CellKey:
        """The key of a row that tells cached tokens at its step."""
        asked = 0 if prompt_len else context_len - new_tokens // 2
        return cls(phase, Cell(batch_size, prompt_len, new_tokens, asked, engine))


@dataclass(frozen=True)
class Grid:
    """All cells of a run; every prompt length, context length and engine meets every batch size."""

    prompt_lens: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    new_tokens: int
    context_lens: tuple[int, ...] = ()
    engines: tuple[str, ...] = (DEFAULT_ENGINE,)
    ragged: Ragged | None = None
    """Where prompts are of unequal lengths: each batch size meets one batch of them, as long as its longest."""

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Cells in ascending order of tokens, so that the cheap ones come first; engines side by side."""
        cells = (
            Cell(batch, prompt, new_tokens, context, engine)
            for batch in self.batch_sizes
            for prompt, new_tokens, context in self._shapes(batch)
            for engine in self.engines
        )
        return tuple(sorted(cells, key=lambda cell: (cell.batch_size * cell.depth, cell.batch_size)))

    @property
    def keys(self) -> tuple[CellKey, ...]:
        """What is timed, in the order of a table's rows: by phase, engine, batch and depth."""
        ordered = sorted(self.cells, key=lambda cell: (self.engines.index(cell.engine), cell.batch_size, cell.depth))
        return tuple(CellKey(phase, cell) for phase in PHASES for cell in ordered if CellKey(phase, cell) in cell.keys)

    def _shapes(self, batch_size: int) -> list[tuple[int, int, int]]:
        """(prompt, new tokens, context) of the cells of a batch size."""
        if self.ragged is not None:
            batch = self.ragged.batch(batch_size)
            return [(longest(batch), max(request.new_tokens for request in batch), 0)]
        prompts = [(prompt, self.new_tokens, 0) for prompt in self.prompt_lens]
        return prompts + [(0, self.new_tokens, context) for context in self.context_lens]

    @property
    def longest_context(self) -> int:
        """Tokens in the cache at the last step of the longest cell."""
        return max(cell.slots for cell in self.cells)

    def requests_of(self, cell: Cell) -> Batch | None:
        """The unequal prompts of a cell; None where all of its prompts are as long as the cell says."""
        if self.ragged is None or cell.engine != PADDED_ENGINE:
            return None
        return self.ragged.batch(cell.batch_size)

    def useful_tokens(self, key: CellKey) -> float:
        """Tokens that a step is for: of unequal prompts those that are not padding, and sequences that still write."""
        batch = self.requests_of(key.cell)
        if batch is None:
            return key.tokens
        if key.phase == "prefill":
            return sum(request.prompt_len for request in batch)
        return len(batch) * (1 - waiting(batch))


def parse_values(text: str, option: str) -> tuple[int, ...]:
    """`"64,256"`, `"128"`, `"64..2048*2"` (doubling) or `"1..9+2"` (steps) as ascending distinct whole numbers.

    A range's last value is included when the steps hit it. Raises GridError, naming `option`, for anything else,
    for values below 1 or above MOST, and for more than MAX_VALUES values.
    """
    values: set[int] = set()
    for part in (piece.strip() for piece in text.split(",")):
        if _NUMBER.fullmatch(part):
            values.add(int(part))
        elif match := _RANGE.fullmatch(part):
            values.update(_expand(match, part, option))
        else:
            raise GridError(f"{option}: {part!r} is no number and no range; {_GRAMMAR}.")
        if len(values) > MAX_VALUES:
            raise GridError(f"{option}: {text!r} gives more than {MAX_VALUES} values; use a wider step.")
    return _checked(values, option)


def make_grid(
    prompt_lens: str | Sequence[int] | Ragged,
    batch_sizes: str | Sequence[int],
    new_tokens: int,
    context_lens: str | Sequence[int] = (),
    engines: Sequence[str] = (DEFAULT_ENGINE,),
) -> Grid:
    """A Grid from texts in the range grammar or from plain numbers. Raises GridError.

    Without prompt lengths only decodes at the given context lengths are timed. `ragged:32..512` and `ragged:FILE` are
    prompts of unequal lengths.
    """
    if new_tokens < _LEAST_NEW_TOKENS:
        raise GridError(
            f"--new-tokens: {new_tokens} is too few to time a decode step; use {_LEAST_NEW_TOKENS} or more."
        )
    _checked([new_tokens], "--new-tokens")
    if isinstance(prompt_lens, Ragged) or (isinstance(prompt_lens, str) and prompt_lens.startswith(RAGGED)):
        return _ragged_grid(prompt_lens, _values(batch_sizes, "--batch-sizes"), new_tokens, context_lens, engines)
    contexts = _values(context_lens, "--context-lens") if context_lens else ()
    return Grid(
        prompt_lens=_values(prompt_lens, "--prompt-lens") if prompt_lens or not contexts else (),
        batch_sizes=_values(batch_sizes, "--batch-sizes"),
        new_tokens=new_tokens,
        context_lens=contexts,
        engines=tuple(dict.fromkeys(engines)),
    )


def _ragged_grid(
    asked: str | Ragged,
    batch_sizes: tuple[int, ...],
    new_tokens: int,
    context_lens: str | Sequence[int],
    engines: Sequence[str],
) -> Grid:
    """Each batch of unequal prompts padded, and the same shape with neither padding nor mask beside it."""
    if context_lens:
        raise GridError("--context-lens fills a cache alike for all sequences: leave it out with ragged prompts.")
    if set(engines) - {DEFAULT_ENGINE, PADDED_ENGINE}:
        raise GridError(
            f"--prompt-lens ragged: is stepped by --engine {DEFAULT_ENGINE} alone, with and without a mask."
        )
    ragged = asked if isinstance(asked, Ragged) else parse_ragged(asked, batch_sizes[-1], new_tokens)
    grid = Grid((), batch_sizes, new_tokens, (), (PADDED_ENGINE, DEFAULT_ENGINE), ragged)
    if min(cell.new_tokens for cell in grid.cells) < _LEAST_NEW_TOKENS:
        raise GridError(
            f"--prompt-lens: a batch of {ragged.name} writes fewer than {_LEAST_NEW_TOKENS} tokens, which is too few to"
            " time a decode step."
        )
    return replace(grid, prompt_lens=tuple(sorted({cell.prompt_len for cell in grid.cells})))


def _values(given: str | Sequence[int], option: str) -> tuple[int, ...]:
    return parse_values(given, option) if isinstance(given, str) else _checked(given, option)


def _checked(values: Iterable[int], option: str) -> tuple[int, ...]:
    ordered = tuple(sorted(set(values)))
    if not ordered:
        raise GridError(f"{option}: no value given; {_GRAMMAR}.")
    if ordered[0] < 1:
        raise GridError(f"{option}: {ordered[0]} is not possible; every value must be 1 or more.")
    if ordered[-1] > MOST:
        raise GridError(f"{option}: {ordered[-1]} is not possible; no value may be above {MOST}.")
    return ordered


def _expand(match: re.Match[str], part: str, option: str) -> list[int]:
    first, last = int(match[1]), int(match[2])
    operator, step = match[3] or "+", int(match[4] or 1)
    if first < 1 or last < first:
        raise GridError(f"{option}: {part!r} does not run upwards from 1 or more; {_GRAMMAR}.")
    if step < (2 if operator == "*" else 1):
        raise GridError(f"{option}: {part!r} never reaches its end; use a factor of 2 or more, or a step of 1 or more.")
    values: list[int] = []
    value = first
    while value <= last and len(values) <= MAX_VALUES:
        values.append(value)
        value = value * step if operator == "*" else value + step
    return values


def check_positions(limit: int | None, longest: int, shorter: str) -> None:
    """Raises RequestError for a sequence of `longest` tokens that a model has no positions for.

    `limit` is the model's (None: any), `shorter` names the options that make the sequence shorter.
    """
    if limit is not None and longest > limit:
        raise RequestError(
            f"the longest prompt plus its new tokens is {longest} tokens, but this model's limit is {limit};"
            f" use {shorter}."
        )
