"""Cells (prompt length, batch size, context and engine), their phases, and the grid of all cells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from profiler.grid.ragged import PADDED_ENGINE, Batch, Ragged, longest, waiting

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)

DEFAULT_ENGINE = "eager"


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """A batch of prompts of one length, prefilled and then decoded.

    With `context_len` alone the cache is filled and only the decode is timed; with both it is a shared, cached prefix.
    """

    batch_size: int
    prompt_len: int
    new_tokens: int
    context_len: int = 0
    engine: str = DEFAULT_ENGINE

    @property
    def depth(self) -> int:
        """Tokens in the cache when decoding begins."""
        return self.prompt_len + self.context_len

    @property
    def prefix(self) -> int:
        """The first tokens of every prompt, which are cached before it."""
        return self.context_len if self.prompt_len else 0

    @property
    def prefilled(self) -> int:
        """Tokens of the prefill before the decode; without a prompt one, and random keys and values fill the cache."""
        return self.prompt_len or 1

    @property
    def slots(self) -> int:
        """Tokens of one sequence that the cache contains at the end."""
        return self.depth + self.new_tokens

    @property
    def decode_steps(self) -> int:
        """Decode forwards: the prefill gives the first new token."""
        return self.new_tokens - 1

    @property
    def keys(self) -> tuple[CellKey, ...]:
        """Keys of the timed phases: prefill and decode, or only decode without a prompt."""
        phases: tuple[Phase, ...] = PHASES if self.prompt_len else ("decode",)
        return tuple(CellKey(phase, self) for phase in phases)

    @property
    def name(self) -> str:
        """Such as `4 x 128 (static)`: batch, depth, and the engine unless it is `eager`."""
        engine = "" if self.engine == DEFAULT_ENGINE else f" ({self.engine})"
        return f"{self.batch_size} x {self.depth}{engine}"


@dataclass(frozen=True, order=True, slots=True)
class CellKey:
    """One phase of one cell. Its step is the prefill of the whole prompt, or the middle step of the decode loop."""

    phase: Phase
    cell: Cell

    @property
    def query_tokens(self) -> int:
        """New tokens per sequence in its step."""
        return self.cell.prompt_len if self.phase == "prefill" else 1

    @property
    def context_len(self) -> int:
        """Cached tokens at its step; the median over a decode loop describes the middle step."""
        return self.cell.prefix if self.phase == "prefill" else self.cell.depth + self.cell.new_tokens // 2

    @property
    def tokens(self) -> int:
        """Tokens that its step processes."""
        return self.cell.batch_size * self.query_tokens

    @property
    def name(self) -> str:
        """Such as `decode 1 x 64 (static)`."""
        return f"{self.phase} {self.cell.name}"

    @property
    def series(self) -> tuple[Phase, int, int, int, str]:
        """All properties but the batch size: equal for keys that differ only by it."""
        cell = self.cell
        return self.phase, cell.prompt_len, cell.context_len, cell.new_tokens, cell.engine

    def on(self, engine: str) -> CellKey:
        """Return the key of the same cell on another engine."""
        return replace(self, cell=replace(self.cell, engine=engine))

    @classmethod
    def at(
        cls, phase: Phase, batch_size: int, prompt_len: int, context_len: int, new_tokens: int, engine: str
    ) -> CellKey:
        """Return the key for a row of a table; `context_len` is the number of cached tokens at its step."""
        filled = context_len if phase == "prefill" else context_len - prompt_len - new_tokens // 2
        return cls(phase, Cell(batch_size, prompt_len, new_tokens, filled, engine))

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of `KeyedRecord`, from which `at` returns this key."""
        return {
            "phase": self.phase,
            "batch_size": self.cell.batch_size,
            "prompt_len": self.cell.prompt_len,
            "context_len": self.context_len,
            "new_tokens": self.cell.new_tokens,
            "engine": self.cell.engine,
        }


@dataclass(frozen=True, slots=True)
class KeyedRecord:
    """The columns with which files identify a cell and its phase."""

    phase: Phase
    """`prefill` or `decode`."""
    batch_size: int
    """Sequences per batch."""
    prompt_len: int
    """Prompt tokens per sequence, without a cached prefix; 0 if the cache was filled directly."""
    context_len: int
    """Cached tokens at the step; in a prefill, those of a prefix."""
    new_tokens: int
    """Tokens decoded after the prompt."""
    engine: str
    """The engine that ran the model."""

    @property
    def key(self) -> CellKey:
        return CellKey.at(self.phase, self.batch_size, self.prompt_len, self.context_len, self.new_tokens, self.engine)


def by_size(cells: Iterable[Cell]) -> list[Cell]:
    """Return cells in ascending order of tokens in the cache, and of sequences."""
    return sorted(cells, key=lambda cell: (cell.batch_size * cell.depth, cell.batch_size))


def extremes(cells: Iterable[Cell]) -> list[Cell]:
    """Return the smallest cell and the largest, without the same one twice."""
    ordered = by_size(cells)
    return list(dict.fromkeys([*ordered[:1], *ordered[-1:]]))


@dataclass(frozen=True)
class Grid:
    """All cells of a run: each prompt length, context length and engine with each batch size."""

    prompt_lens: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    new_tokens: int
    context_lens: tuple[int, ...] = ()
    engines: tuple[str, ...] = (DEFAULT_ENGINE,)
    ragged: Ragged | None = None
    """Prompts of unequal lengths: one batch per batch size, whose cell is as long as its longest prompt."""
    prefix: int = 0
    """The first tokens of every prompt, which are cached before it."""
    unreached: tuple[Cell, ...] = ()
    """Cells of a default grid that the budget did not reach: they are left out."""

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Cells in the order of `by_size`, the cheap ones first; the engines of one shape are neighbours."""
        cells = (
            Cell(batch, prompt, new_tokens, context, engine)
            for batch in self.batch_sizes
            for prompt, new_tokens, context in self._shapes(batch)
            for engine in self.engines
        )
        return tuple(by_size(cell for cell in cells if cell not in self.unreached))

    @property
    def keys(self) -> tuple[CellKey, ...]:
        """Keys of all timed phases, in the order of a table's rows: by phase, engine, batch and depth."""
        ordered = sorted(self.cells, key=lambda cell: (self.engines.index(cell.engine), cell.batch_size, cell.depth))
        return tuple(CellKey(phase, cell) for phase in PHASES for cell in ordered if CellKey(phase, cell) in cell.keys)

    def _shapes(self, batch_size: int) -> list[tuple[int, int, int]]:
        """(prompt, new tokens, context) of the cells of a batch size."""
        if self.ragged is not None:
            batch = self.ragged.batch(batch_size)
            return [(longest(batch), max(request.new_tokens for request in batch), 0)]
        prompts = [(prompt - self.prefix, self.new_tokens, self.prefix) for prompt in self.prompt_lens]
        return prompts + [(0, self.new_tokens, context) for context in self.context_lens]

    @property
    def longest_context(self) -> int:
        """Tokens in the cache at the last step of the longest cell."""
        return max(cell.slots for cell in self.cells)

    def requests_of(self, cell: Cell) -> Batch | None:
        """Return the unequal prompts of a cell; None if all its prompts are as long as the cell."""
        if self.ragged is None or cell.engine != PADDED_ENGINE:
            return None
        return self.ragged.batch(cell.batch_size)

    def useful_tokens(self, key: CellKey) -> float:
        """Return the useful tokens of a step: without padding, and without sequences that have ended."""
        batch = self.requests_of(key.cell)
        if batch is None:
            return key.tokens
        if key.phase == "prefill":
            return sum(request.prompt_len for request in batch)
        return len(batch) * (1 - waiting(batch))
