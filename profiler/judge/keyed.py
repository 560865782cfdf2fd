"""The columns with which files identify a cell and its phase."""

from dataclasses import dataclass
from typing import Any

from profiler.grid.cells import CellKey, Phase


@dataclass(frozen=True, slots=True)
class KeyedRecord:
    """The columns that identify a record."""

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


def columns_of(key: CellKey) -> dict[str, Any]:
    """The columns of `KeyedRecord` for a key."""
    cell = key.cell
    lengths = {"prompt_len": cell.prompt_len, "context_len": key.context_len, "new_tokens": cell.new_tokens}
    return {"phase": key.phase, "batch_size": cell.batch_size, **lengths, "engine": cell.engine}
