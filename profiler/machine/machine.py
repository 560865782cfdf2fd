"""One door to the device: its clock, memory, streams, captures and telemetry."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from profiler.errors import DeviceError, RequestError, first_line
from profiler.machine import clock, memory
from profiler.machine.clock import Clock
from profiler.machine.device import Device, describe
from profiler.machine.telemetry import Source, source_for

if TYPE_CHECKING:
    import torch


class Machine:
    """A CPU: work has ended when its call returns, and nothing can be captured."""

    captures = False
    """Whether work can be recorded once and replayed without the host."""

    def __init__(self, device: torch.device, *, clock: Clock | None = None, source: Source | None = None) -> None:
        self.device = device
        self._clock = clock
        self._source = source

    @cached_property
    def clock(self) -> Clock:
        """Marks points in the device's own stream of work."""
        return self._clock or clock.clock_for(self.device)

    @cached_property
    def source(self) -> Source:
        """What reports on the device."""
        return self._source or source_for(self.device)

    @cached_property
    def info(self) -> Device:
        """What the device is."""
        return describe(self.device)

    @property
    def is_cuda(self) -> bool:
        return bool(self.device.type == "cuda")

    @property
    def links(self) -> tuple[str, ...]:
        """Where data may come from over a link: the host, other cards (`cuda:N`); a CPU has none but its disk."""
        return ()

    def now_s(self) -> float:
        """The host's monotonic clock."""
        return clock.now_s()

    def unix_s(self) -> float:
        """The host's wall clock, to tell when something was."""
        return time.time()

    def available_bytes(self) -> int:
        """Bytes that can still be allocated."""
        return memory.available_bytes(self.device)

    def reset_peak(self) -> None:
        """Start a new peak measurement."""
        memory.reset_peak(self.device)

    def peak_bytes(self) -> int | None:
        """Most bytes in use since `reset_peak`; None where the system does not say."""
        return memory.peak_bytes(self.device)

    def allocated_bytes(self) -> int:
        """Bytes of the device that live tensors of this process hold; 0 on a CPU, which does not keep count of them."""
        return memory.allocated_bytes(self.device)

    def used_bytes(self) -> int | None:
        """Bytes of the device in use by everyone on it; None on a CPU."""
        return memory.used_bytes(self.device)

    def release(self) -> None:
        """Give memory that nobody uses back to the device, as after running out of it."""
        memory.trim_heap()

    def trouble(self) -> str:
        """Why the device takes no more work, such as a card that fell off its bus; empty where it does."""
        return ""

    def recover(self, what: str) -> None:
        """Give back what something that failed has held. Raises DeviceError where the device is lost since then."""
        gc.collect()
        if trouble := self.trouble():
            raise DeviceError(f"the device is lost since {what}: {trouble}; what was measured is kept.")
        self.release()

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Record `work`, which has run before, and give what replays it. Raises RequestError where that cannot be."""
        raise RequestError("work can be captured on a CUDA device alone, and this one is a CPU.")

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Run what lies within on a stream of its own, as work must be that a capture is to follow."""
        yield

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Name what runs within for the device's own profilers."""
        yield


class CudaMachine(Machine):
    """A CUDA card: the host runs ahead of it, and its work can be captured as a graph."""

    captures = True

    def __init__(self, device: torch.device, *, clock: Clock | None = None, source: Source | None = None) -> None:
        import torch

        super().__init__(device, clock=clock, source=source)
        self._cuda = torch.cuda
        # Streams, graphs and new tensors go to the current card, whatever card a model lies on.
        torch.cuda.set_device(device)

    @property
    def links(self) -> tuple[str, ...]:
        own = self.device.index or 0
        return ("host", *(f"cuda:{index}" for index in range(self._cuda.device_count()) if index != own))

    def release(self) -> None:
        self._cuda.empty_cache()

    def trouble(self) -> str:
        try:
            self._cuda.synchronize(self.device)
        except RuntimeError as error:  # an error of CUDA's stays with its context: whatever is asked gives it again
            return first_line(error)
        return ""

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        graph, before = self._cuda.CUDAGraph(), self._cuda.current_stream(self.device)
        try:
            with self._cuda.graph(graph):
                work()
        except RuntimeError as error:
            # torch.cuda.graph ends a failed capture before it leaves its stream, and does not come to leave it then.
            self._cuda.set_stream(before)
            if isinstance(error, self._cuda.OutOfMemoryError):
                raise
            first = error.__context__ or error  # ending a failed capture fails once more
            raise RequestError(f"this cannot be captured as a CUDA graph: {first_line(first)}.") from error
        replay: Callable[[], object] = graph.replay
        return replay

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        """One for all: cuBLAS keeps a workspace for each stream that it was ever used on, 8 to 32 MiB."""
        return self._cuda.Stream(self.device)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        side = self._side
        side.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(side):
            yield
        self._cuda.current_stream().wait_stream(side)

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        self._cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            self._cuda.nvtx.range_pop()


def machine_for(device: torch.device, *, clock: Clock | None = None, source: Source | None = None) -> Machine:
    """The machine that a device belongs to; on CUDA the device becomes torch's current one."""
    kind = CudaMachine if device.type == "cuda" else Machine
    return kind(device, clock=clock, source=source)
