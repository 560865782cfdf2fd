"""One card: its memory, its caches, its streams, its clock, and a log of every kernel that it ran."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .allocator import Allocator
from .host import Host
from .stream import Stream
from .truth import Truth

_LULL_S = 1e-4
"""Kernels that follow each other closer than this are one span of being busy."""

Region = tuple[int, int]
"""Address and bytes."""


class Work(NamedTuple):
    """What one kernel does."""

    name: str
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    flops: float = 0.0
    dtype: str = ""
    """Of a product's operands."""
    link_s: float = 0.0
    """Seconds over a link, for a copy from elsewhere."""


@dataclass(slots=True)
class Kernel:
    """What one kernel did: an entry of the log."""

    work: Work
    memory_bytes: int
    l2_bytes: int
    launched: bool
    """Whether the host launched it; all but the first of a replayed graph are not."""
    host_operators: int = 0
    """How many operators the host ran on its own tensors since the launch before."""
    awaited: bool = False
    """Whether the host waited for it."""
    duration_s: float = 0.0
    start_s: float = 0.0


class Cache:
    """The L2: what was touched last, up to its size; whoever is larger than it streams through and leaves nothing."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._held: OrderedDict[Region, None] = OrderedDict()
        self._total = 0

    def hit(self, region: Region) -> bool:
        """Whether a region was still there; it is afterwards if it can be."""
        nbytes = region[1]
        if region in self._held:
            self._held.move_to_end(region)
            return True
        if nbytes > self._nbytes:
            self._held.clear()
            self._total = 0
            return False
        self._held[region] = None
        self._total += nbytes
        while self._total > self._nbytes:
            (_, gone), _ = self._held.popitem(last=False)
            self._total -= gone
        return False

    def write(self, region: Region) -> bool:
        """Whether a written region stays in the cache instead of going to memory."""
        self.hit(region)
        return region in self._held


class Card:
    """A card and what happened on it."""

    def __init__(self, index: int, truth: Truth, host: Host) -> None:
        self.index = index
        self.truth = truth
        self.host = host
        self.memory = Allocator(truth.memory_bytes, truth.taken_bytes)
        self.streams: list[Stream] = []
        self.default_stream = Stream(self)
        self.stream = self.default_stream
        """The current one."""
        self.busy_s = 0.0
        self.spans: list[tuple[float, float]] = []
        """Start and end of what kept it busy lately."""
        self.log: list[Kernel] | None = None
        self._operators_before = 0
        self._cache = Cache(truth.l2_bytes)

    @property
    def clock_share(self) -> float:
        """The clock now, as a share of its rated one."""
        throttle = self.truth.throttle
        return throttle.share if throttle is not None and self.busy_s >= throttle.after_busy_s else 1.0

    def launch(self, work: Work) -> None:
        """Send one kernel to the current stream, or into what it captures."""
        if self.stream.capture is not None:
            self.host.advance(self.truth.launch_s)
            self.stream.capture.record(work)  # type: ignore[attr-defined]
            return
        kernel = self._run(work, launched=True)
        self._submit([kernel], self.truth.launch_s)

    def replay(self, works: Sequence[Work]) -> None:
        """Send recorded kernels to the current stream as one launch."""
        kernels = [self._run(work, launched=number == 0) for number, work in enumerate(works)]
        self._submit(kernels, self.truth.graph_launch_s)

    def _run(self, work: Work, *, launched: bool) -> Kernel:
        """What a kernel takes now, with what the cache holds."""
        cache = self._cache
        memory_bytes = l2_bytes = 0
        for region in work.reads:
            if cache.hit(region):
                l2_bytes += region[1]
            else:
                memory_bytes += region[1]
        for region in work.writes:
            if cache.write(region):
                l2_bytes += region[1]
            else:
                memory_bytes += region[1]
        kernel = Kernel(work, memory_bytes, l2_bytes, launched)
        kernel.duration_s = duration_s(kernel, self.truth, self.clock_share)
        return kernel

    def _submit(self, kernels: Sequence[Kernel], host_s: float) -> None:
        seconds = sum(kernel.duration_s for kernel in kernels)
        start_s = self.stream.submit(seconds, host_s)
        self.busy_s += seconds
        if self.spans and start_s - self.spans[-1][1] < _LULL_S:
            self.spans[-1] = (self.spans[-1][0], start_s + seconds)
        else:
            self.spans.append((start_s, start_s + seconds))
            del self.spans[:-64]
        operators, self._operators_before = self.host.operators - self._operators_before, self.host.operators
        if self.log is not None:
            kernels[0].host_operators = operators
            for kernel in kernels:
                kernel.start_s = start_s
                start_s += kernel.duration_s
                self.log.append(kernel)

    def active_share(self, window_s: float) -> float:
        """Share of the last seconds in which any kernel ran."""
        now = self.host.now_s
        busy = sum(max(0.0, min(end, now) - max(start, now - window_s)) for start, end in self.spans)
        return min(1.0, busy / window_s)


def duration_s(kernel: Kernel, truth: Truth, clock_share: float = 1.0) -> float:
    """max(bytes / bandwidth, FLOPs / peak, the smallest kernel), or what a link takes."""
    work = kernel.work
    moving_s = kernel.memory_bytes / truth.bytes_per_s + kernel.l2_bytes / (truth.l2_bytes_per_s * clock_share)
    computing_s = work.flops / (truth.flops_per_s[work.dtype] * clock_share) if work.flops else 0.0
    share = 1.0
    if truth.kernel_share:
        share = next((share for part, share in truth.kernel_share.items() if part in work.name), 1.0)
    return max(moving_s / share, computing_s / share, work.link_s, truth.smallest_kernel_s)
