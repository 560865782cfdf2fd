"""CUDA graphs: work recorded once, at fixed addresses, and replayed as one launch."""

from __future__ import annotations

from .card import Card
from .native import native

_LOST = "CUDA error: operation failed due to a previous error during capture"


class Graph:
    """torch.cuda.CUDAGraph on whatever card is current when the capture begins."""

    def __init__(self, current: Card | None = None) -> None:
        self.core = native().Recording()
        self._card: Card | None = None

    def capture_begin(self, card: Card) -> None:
        if card.stream is card.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._card = card
        card.stream.capture = self

    def capture_end(self) -> None:
        """Raises RuntimeError where something on the way could not be captured; the stream is free again either way."""
        assert self._card is not None
        self._card.stream.capture = None
        if self.core.invalid:
            raise RuntimeError(_LOST)

    def replay(self) -> None:
        if self._card is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._card.core.replay(self.core)

    def reset(self) -> None:
        self.core.reset()

    def __del__(self) -> None:
        self.reset()
