"""CUDA graphs: work recorded once, at fixed addresses, and replayed as one launch."""

from __future__ import annotations

from .allocator import PrivatePool
from .card import Card, Work

_LOST = "CUDA error: operation failed due to a previous error during capture"


class Graph:
    """torch.cuda.CUDAGraph on whatever card is current when the capture begins."""

    def __init__(self, current: Card | None = None) -> None:
        self._pool = PrivatePool()
        self._works: list[Work] = []
        self._card: Card | None = None
        self.invalid = False

    def capture_begin(self, card: Card) -> None:
        if card.stream is card.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._card = card
        card.stream.capture = self

    def capture_end(self) -> None:
        """Raises RuntimeError where something on the way could not be captured; the stream is free again either way."""
        assert self._card is not None
        self._card.stream.capture = None
        if self.invalid:
            raise RuntimeError(_LOST)

    def record(self, work: Work) -> None:
        self._works.append(work)

    @property
    def pool(self) -> PrivatePool:
        return self._pool

    def replay(self) -> None:
        if self._card is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if self._works:
            self._card.replay(self._works)
        else:
            self._card.host.advance(self._card.truth.graph_launch_s)

    def reset(self) -> None:
        self._pool.alive = False

    def __del__(self) -> None:
        self.reset()
