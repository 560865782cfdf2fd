"""One card: memory, caches, streams, events, graphs, clock, and a log of all its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from .host import Host
from .native import native
from .truth import Truth

_TICK_S = 0.5e-6
"""Resolution of an event (CUDA Runtime API, cudaEventElapsedTime)."""

CAPTURING = (
    "CUDA error: operation not permitted when stream is capturing\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)
_LOST = "CUDA error: operation failed due to a previous error during capture"

PoolId = tuple[int, int]
Region = tuple[int, int]


@dataclass(slots=True)
class Kernel:
    """One executed kernel: an entry of the log. The fields are those that the C++ card reports, in its order."""

    name: str
    reads: Sequence[Region]
    writes: Sequence[Region]
    flops: float
    dtype: str
    link_s: float
    """Seconds over a link, for a copy from elsewhere."""
    memory_bytes: int
    l2_bytes: int
    launched: bool
    """Whether the host launched it; false for all but the first kernel of a replayed graph."""
    host_operators: int
    """The number of operators that the host ran on its own tensors since the previous launch."""
    duration_s: float
    start_s: float
    awaited: bool = False
    """Whether the host waited for it."""


class Card:
    def __init__(self, index: int, truth: Truth, host: Host) -> None:
        self.index = index
        self.truth = truth
        self.host = host
        throttle = truth.throttle
        self.memory = native().Allocator(truth.memory_bytes, truth.taken_bytes)
        self.core = native().Card(
            index,
            host.core,
            speeds(truth),
            native().Clock(throttle.after_busy_s, throttle.share, *astuple(truth.power_cap)),
            # cuBLAS has a workspace per stream (CUDAContextLight.h: 32 MiB on Hopper, 8 MiB before).
            (32 << 20) if truth.capability >= (9, 0) else (8 << 20),
            truth.l2_bytes,
            truth.l2_writes_back,
            self.memory,
        )
        self.streams: list[Stream] = []
        self._log: list[Kernel] | None = None
        self.default_stream = Stream(self)
        self.use(self.default_stream)

    def use(self, stream: Stream) -> None:
        """Make a stream the current one."""
        self.stream = stream
        self.core.queue = stream.core

    @property
    def log(self) -> list[Kernel] | None:
        return self._log

    @log.setter
    def log(self, log: list[Kernel] | None) -> None:
        self._log = log
        self.core.on_kernel = None if log is None else lambda *kernel: log.append(Kernel(*kernel))


def speeds(truth: Truth) -> Any:
    kernels = truth.bytes_per_s, truth.l2_bytes_per_s, truth.smallest_kernel_s
    host = truth.launch_s, truth.graph_launch_s, truth.host_operator_s
    return native().Speeds(*kernels, *host, dict(truth.flops_per_s), list(truth.kernel_share.items()))


def duration_s(kernel: Kernel, truth: Truth, clock_share: float = 1.0) -> float:
    """Return max(bytes / bandwidth, FLOPs / peak), or the smallest kernel, or the time over a link."""
    done = kernel.name, kernel.memory_bytes, kernel.l2_bytes, kernel.flops, kernel.dtype, kernel.link_s
    return speeds(truth).duration_s(*done, clock_share)


class Stream:
    def __init__(self, card: Card) -> None:
        self.card = card
        self.core = native().Queue()
        card.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        self.core.ready_s = max(self.core.ready_s, other.core.ready_s)

    def refuse_capture(self) -> None:
        """Raise CUDA's error for a call that a capture cannot record; the capture is then lost."""
        if self.core.capture is not None:
            self.core.capture.invalid = True
            raise RuntimeError(CAPTURING)

    def wait(self) -> None:
        if self.card.log:
            self.card.log[-1].awaited = True
        self.card.host.wait_until(self.core.ready_s)


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._timed = enable_timing
        self._at_s: float | None = None
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = torch.cuda.current_stream() if stream is None else stream
        stream.card.host.advance(stream.card.truth.event_s)
        self._stream, self._at_s = stream, max(stream.core.ready_s, stream.card.host.now_s)

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


class Graph:
    def __init__(self) -> None:
        self.core = native().Recording()
        self._card: Card | None = None
        self._pool: PoolId = (0, 0)
        self._uses_pool = False
        """Whether `reset` releases the pool."""
        self._recorded = False

    def capture_begin(self, pool: PoolId | None = None, **_: Any) -> None:
        card = torch.cuda.current_stream().card
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        if card.stream is card.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.core.pool = card.memory.begin_capture(pool)
        self._card, self._pool = card, pool
        self._uses_pool = card.truth.torch_version >= (2, 14)
        card.core.generator_captures = card.truth.torch_version <= (2, 11)
        card.stream.core.capture = self.core

    def capture_end(self) -> None:
        """End the capture and free the stream. Raises RuntimeError if a call could not be captured."""
        card = self._card
        assert card is not None
        card.stream.core.capture = None
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
