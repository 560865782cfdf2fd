"""The layers of transformers' KV caches (cache_utils.py, 5.23): the keys that attention gets, and what an update moves.

Tokens are those of one sequence, bytes those of one element per token. Both may be arrays, with one per step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from profiler.facts.cache_format import CacheFormat
from profiler.facts.operators import Cause
from profiler.facts.step import Count, ExecutionPath, Step


@dataclass(frozen=True)
class Cache:
    """A cache that moves no token again, such as a paged one."""

    itemsize: int
    """Bytes of an element in the model's dtype."""
    window: int | None
    """Keys that it keeps for a query, including its own; None means all."""
    has_slots: ClassVar[bool] = False
    """Whether attention also gets slots without a token, which even a single new token needs a mask to hide."""

    def live(self, tokens: Count) -> Any:
        """Return how many of `tokens` it holds for the next one, which completes its window."""
        return tokens if self.window is None else np.minimum(tokens, self.window - 1)

    def keys(self, step: Step) -> Any:
        """Return the keys that attention gets: those of live tokens, of new ones, and of slots without a token."""
        return self.live(step.context) + step.query

    def moved_bytes(self, step: Step) -> Mapping[Cause, Count]:
        """Return the traffic of an update beyond writing the new tokens, and that of reading them wider, by cause."""
        return {}

    def stored_bytes(self, tokens: Any) -> Any:
        return tokens * self.itemsize

    def written_bytes(self, step: Step) -> Any:
        """Return the bytes of the new tokens as they are cached first."""
        return step.query * self.itemsize

    def _overflows(self, step: Step) -> Any:
        return False if self.window is None else np.greater(step.context + step.query, self.window)


@dataclass(frozen=True)
class DynamicCache(Cache):
    """Each update concatenates the cached tokens with the new ones (`DynamicLayer`, `DynamicSlidingWindowLayer`)."""

    def moved_bytes(self, step: Step) -> Mapping[Cause, Count]:
        copied_bytes = 2 * self.keys(step) * self.itemsize
        rolls = self._overflows(step) & np.greater(step.context, 0)
        return {
            Cause.CACHE_COPIES: np.where(rolls, 0, copied_bytes),
            Cause.ROLLED_WINDOWS: np.where(rolls, copied_bytes, 0),
        }


@dataclass(frozen=True)
class StaticCache(Cache):
    """It has all its slots from the start, at most a window (`StaticLayer`, `StaticSlidingWindowLayer`).

    Free slots take new tokens. A full window rolls all its slots for a single token and copies them back. For several
    it concatenates, unless it is empty, and copies the last ones back.
    """

    slots: Any
    has_slots = True

    def keys(self, step: Step) -> Any:
        return np.maximum(self.slots, np.minimum(step.context, self.slots - 1) + step.query)

    def moved_bytes(self, step: Step) -> Mapping[Cause, Count]:
        joined = np.where(np.greater(step.context, 0), self.keys(step), 0)
        copied = self.slots + np.where(np.equal(step.query, 1), self.slots, joined)
        return {Cause.ROLLED_WINDOWS: np.where(self._overflows(step), 2 * copied * self.itemsize, 0)}


@dataclass(frozen=True)
class QuantizedCache(Cache):
    """It stores tokens in fewer bits, and converts all of them for each step after a prompt (`QuantizedLayer`).

    With groups it converts what is packed, concatenates it with the newest tokens, and these with the new one. fp8
    concatenates what is stored and converts all of it (`Fp8QuantizedLayer`). Attention then reads the model's dtype.
    """

    stored: CacheFormat
    newest: Count
    """The newest tokens, which are still in the model's dtype."""

    def moved_bytes(self, step: Step) -> Mapping[Cause, Count]:
        wide, narrow = self.itemsize, self.stored.element_bytes(self.itemsize)
        packed = tokens = step.context + step.query
        copied_bytes: Any = 2 * tokens * narrow
        if self.stored.residual_tokens:
            newest = self.newest + step.query
            packed, copied_bytes = tokens - newest, (tokens + 3 * newest) * wide
        later = np.greater(step.context, 0)
        return {
            Cause.CACHE_COPIES: later * copied_bytes,
            Cause.CACHE_CONVERSION: later * packed * (narrow + self.stored.conversion_bytes(wide)),
            Cause.CONVERTED_READS: later * packed * (wide - narrow),
        }

    def stored_bytes(self, tokens: Any) -> Any:
        return (tokens - self.newest) * self.stored.element_bytes(self.itemsize) + self.newest * self.itemsize

    def written_bytes(self, step: Step) -> Any:
        waits = np.greater(step.context, 0) & (self.stored.residual_tokens > 0)
        return step.query * np.where(waits, self.itemsize, self.stored.element_bytes(self.itemsize))


def cache_of(path: ExecutionPath, itemsize: int, window: int | None) -> Cache:
    if path.cache_format is not None:
        return QuantizedCache(itemsize, window, path.cache_format, path.residual_tokens)
    if path.cache == "static":
        slots = path.static_cache_len
        return StaticCache(itemsize, window, slots if window is None else np.minimum(slots, window))
    return DynamicCache(itemsize, window) if path.cache == "dynamic" else Cache(itemsize, window)
