"""One card: memory, caches, streams, clock, and a log of all its kernels."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from .host import Host
from .native import native
from .stream import Stream
from .truth import Truth

Region = tuple[int, int]
"""Address and bytes."""


class Work(NamedTuple):
    """The work of one kernel."""

    name: str
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    flops: float = 0.0
    dtype: str = ""
    """The dtype of a product's operands."""
    link_s: float = 0.0
    """Seconds over a link, for a copy from elsewhere."""


@dataclass(slots=True)
class Kernel:
    """One executed kernel: an entry of the log."""

    work: Work
    memory_bytes: int
    l2_bytes: int
    launched: bool
    """Whether the host launched it; false for all but the first kernel of a replayed graph."""
    host_operators: int = 0
    """The number of operators that the host ran on its own tensors since the previous launch."""
    awaited: bool = False
    """Whether the host waited for it."""
    duration_s: float = 0.0
    start_s: float = 0.0


class Card:
    """A card and its history."""

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
        self.stream = self.default_stream = Stream(self)

    @property
    def stream(self) -> Stream:
        """The current stream."""
        return self._stream

    @stream.setter
    def stream(self, stream: Stream) -> None:
        self._stream = stream
        self.core.queue = stream.core

    @property
    def log(self) -> list[Kernel] | None:
        """The log of kernels, if it is recorded."""
        return self._log

    @log.setter
    def log(self, log: list[Kernel] | None) -> None:
        self._log = log
        self.core.on_kernel = None if log is None else lambda *kernel: log.append(_kernel(*kernel))

    def launch(self, work: Work) -> None:
        """Send one kernel to the current stream, or into the graph that it captures."""
        self.core.launch(*work)


def _kernel(*noted: Any) -> Kernel:
    name, reads, writes, flops, dtype, link_s, memory_bytes, l2_bytes, launched, operators, seconds, start_s = noted
    work = Work(name, tuple(reads), tuple(writes), flops, dtype, link_s)
    return Kernel(work, memory_bytes, l2_bytes, launched, operators, duration_s=seconds, start_s=start_s)


def speeds(truth: Truth) -> Any:
    """Return the fields of a truth that determine durations."""
    kernels = truth.bytes_per_s, truth.l2_bytes_per_s, truth.ramp_s, truth.smallest_kernel_s
    host = truth.launch_s, truth.graph_launch_s, truth.host_operator_s
    return native().Speeds(*kernels, *host, dict(truth.flops_per_s), list(truth.kernel_share.items()))


def duration_s(kernel: Kernel, truth: Truth, clock_share: float = 1.0) -> float:
    """Return a ramp and max(bytes / bandwidth, FLOPs / peak); or the smallest kernel, or the time over a link."""
    work = kernel.work
    done = work.name, kernel.memory_bytes, kernel.l2_bytes, work.flops, work.dtype, work.link_s
    return speeds(truth).duration_s(*done, clock_share)
