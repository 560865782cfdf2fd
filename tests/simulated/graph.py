"""CUDA graphs: work recorded once, at fixed addresses, and replayed as one launch.

The state after a failed capture depends on the version of torch (aten/src/ATen/cuda/CUDAGraph.cpp):

- up to 2.12 `capture_end` raises before it notifies the allocator of the end of the capture (PR #180395 changes that);
- up to 2.11 it does not notify the card's default generator either (PR #176752 gives each capture its own state);
- up to 2.13 `reset` releases the private pool only after a successful capture (PR #190348 changes that).
"""

from __future__ import annotations

from .card import Card
from .native import native

_LOST = "CUDA error: operation failed due to a previous error during capture"

PoolId = tuple[int, int]


class Graph:
    """torch.cuda.CUDAGraph on the card that is current when the capture begins."""

    def __init__(self) -> None:
        self.core = native().Recording()
        self._card: Card | None = None
        self._pool: PoolId = (0, 0)
        self._uses_pool = False
        """Whether `reset` releases the pool."""
        self._recorded = False

    def capture_begin(self, card: Card, pool: PoolId) -> None:
        if card.stream is card.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.core.pool = card.memory.begin_capture(pool)
        self._card, self._pool = card, pool
        self._uses_pool = card.truth.torch_version >= (2, 14)
        card.core.generator_captures = card.truth.torch_version <= (2, 11)
        card.stream.capture = self

    def capture_end(self) -> None:
        """End the capture and free the stream. Raises RuntimeError if a call could not be captured."""
        card = self._card
        assert card is not None
        card.stream.capture = None
        if self.core.invalid and card.truth.torch_version <= (2, 12):
            raise RuntimeError(_LOST)
        card.memory.end_capture(self._pool)
        if self.core.invalid:
            raise RuntimeError(_LOST)
        card.core.generator_captures = False
        self._uses_pool = self._recorded = True

    def replay(self) -> None:
        if self._card is None or not self._recorded:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._card.core.replay(self.core)

    def reset(self) -> None:
        if self._card is not None and self._uses_pool:
            self._uses_pool = False
            self._card.memory.release_pool(self._pool)

    def __del__(self) -> None:
        if getattr(self, "_card", None) is not None:
            with self._card.host.terminating():
                self.reset()
