"""Streams and events, like torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .native import native

if TYPE_CHECKING:
    from .card import Card
    from .graph import Graph

_TICK_S = 0.5e-6
"""Resolution of an event (CUDA Runtime API, cudaEventElapsedTime)."""

CAPTURING = (
    "CUDA error: operation not permitted when stream is capturing\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)


class Stream:
    """One stream of one card."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.core = native().Queue()
        self._capture: Graph | None = None
        card.streams.append(self)

    @property
    def ready_s(self) -> float:
        """Time at which its last work ends."""
        return self.core.ready_s

    @property
    def capture(self) -> Graph | None:
        """The graph that records the work sent to this stream."""
        return self._capture

    @capture.setter
    def capture(self, graph: Graph | None) -> None:
        self._capture = graph
        self.core.capture = None if graph is None else graph.core

    def wait_stream(self, other: Stream) -> None:
        """Let later work begin after all work sent to the other stream."""
        self.core.ready_s = max(self.ready_s, other.ready_s)

    def refuse_capture(self) -> None:
        """Raise CUDA's error for a call that a capture cannot record; the capture is then lost."""
        if self.capture is not None:
            self.capture.core.invalid = True
            raise RuntimeError(CAPTURING)

    def wait(self) -> None:
        """Let the host wait for all work sent to this stream."""
        if self.card.log:
            self.card.log[-1].awaited = True
        self.card.host.wait_until(self.ready_s)


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._timed = enable_timing
        self._at_s: float | None = None
        self._stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        stream.card.host.advance(stream.card.truth.event_s)
        self._stream, self._at_s = stream, max(stream.ready_s, stream.card.host.now_s)

    def synchronize(self) -> None:
        if self._stream is not None and self._at_s is not None:
            self._stream.refuse_capture()
            self._stream.card.host.wait_until(self._at_s)

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds to another event. Raises CUDA's RuntimeError if the card has not reached one of
        them."""
        if not (self._timed and other._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at_s is None or other._at_s is None or self._stream is None or other._stream is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self._stream.card is not other._stream.card:
            raise RuntimeError("CUDA error: invalid resource handle")
        if max(self._at_s, other._at_s) > self._stream.card.host.now_s:
            raise RuntimeError("CUDA error: device not ready")
        ticks = round(other._at_s / _TICK_S) - round(self._at_s / _TICK_S)
        return ticks * _TICK_S * 1e3
