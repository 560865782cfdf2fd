"""The only door to a device: clock, memory, streams, captures and telemetry."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

from profiler.device import clock, memory
from profiler.device.clock import Clock
from profiler.device.device import Device, describe
from profiler.device.telemetry import TelemetrySource, source_for
from profiler.errors import CaptureError, DeviceError, first_line

if TYPE_CHECKING:
    import torch

_SYNCHRONISES = "synchronizing CUDA operation"
"""What torch's synchronisation debug mode says (c10/cuda/CUDAFunctions.cpp, `warn_or_error_on_sync`)."""


class Machine:
    """A CPU: work has ended when its call returns, and nothing can be captured."""

    captures = False
    """Whether work can be recorded once and replayed without the host."""

    def __init__(
        self, device: torch.device, *, clock: Clock | None = None, source: TelemetrySource | None = None
    ) -> None:
        self.device = device
        self._clock = clock
        self._source = source

    @cached_property
    def clock(self) -> Clock:
        """Marks points in the device's own stream of work."""
        return self._clock or clock.clock_for(self.device)

    @cached_property
    def source(self) -> TelemetrySource:
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

    def waits(self, work: Callable[[], object]) -> bool:
        """Whether `work` makes the host wait for the device; what follows the first wait does not run then.

        On CUDA torch's synchronisation debug mode answers (`torch.cuda.set_sync_debug_mode`): it raises at the first
        blocking copy, and leaves no state. On a CPU each call ends with its work, so that nothing waits.
        """
        return False

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Record `work`, which has run before, and give what replays it. Raises CaptureError where that cannot be.

        A capture that fails leaves the streams, the allocator and the random generator as they were.
        """
        raise CaptureError("only a CUDA device captures work, and this one is a CPU.")

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Run what is within on a side stream, as work must be before a capture."""
        yield

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Name what runs within for the device's own profilers."""
        yield


class CudaMachine(Machine):
    """A CUDA card: the host runs ahead of it, and its work can be captured as a graph."""

    captures = True

    def __init__(
        self, device: torch.device, *, clock: Clock | None = None, source: TelemetrySource | None = None
    ) -> None:
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

    def waits(self, work: Callable[[], object]) -> bool:
        before = self._cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls this mode a prototype each time it is set
            self._cuda.set_sync_debug_mode("error")
        try:
            work()
        except RuntimeError as error:
            if _SYNCHRONISES not in str(error):
                raise
            return True
        finally:
            self._cuda.set_sync_debug_mode(before)
        return False

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        recorded, before = _Recorded(self._cuda.CUDAGraph(), self._cuda.MemPool()), self._cuda.current_stream()
        try:
            with self._cuda.graph(recorded.graph, pool=recorded.pool.id, stream=side_stream(self.device)):
                work()
        except RuntimeError as error:
            # torch.cuda.graph leaves its stream only after it has ended the capture, which raises.
            self._cuda.set_stream(before)
            self._end_failed_capture(recorded)
            if isinstance(error, self._cuda.OutOfMemoryError):
                raise
            first = error.__context__ or error  # ending a failed capture fails once more
            raise CaptureError(f"this cannot be captured as a CUDA graph: {first_line(first)}.") from error
        return recorded

    def _end_failed_capture(self, recorded: _Recorded) -> None:
        """Undo what a failed capture leaves in torch.

        Up to torch 2.12 the allocator stays in capture, so that `empty_cache` gives nothing back (PyTorch's pull
        request 180395). Up to 2.13 the graph keeps its share of the pool (190348). Up to 2.11 the random generator
        stays in capture until a capture succeeds, and the next random number raises (176752).
        """
        import torch

        index = self.device.index or 0
        recorded.graph.reset()
        with contextlib.suppress(RuntimeError):  # the installed torch has left the capture
            _end_allocating()(index, recorded.pool.id)
        with contextlib.suppress(RuntimeError):
            while recorded.pool.use_count() > 1:
                torch._C._cuda_releasePool(index, recorded.pool.id)
        with contextlib.suppress(RuntimeError):
            number = torch.zeros(1, device=self.device)
            with self._cuda.graph(self._cuda.CUDAGraph(), stream=side_stream(self.device)):
                number.add_(1)

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        side = side_stream(self.device)
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


def _end_allocating() -> Callable[[int, tuple[int, int]], None]:
    """torch's function that ends a capture's allocations from a pool; torch 2.7 calls it otherwise than 2.8 to 2.15."""
    import torch

    found: Callable[[int, tuple[int, int]], None] = (
        getattr(torch._C, "_cuda_endAllocateToPool", None) or torch._C._cuda_endAllocateCurrentStreamToPool
    )
    return found


@dataclass(frozen=True)
class _Recorded:
    """A CUDA graph and the pool that its memory comes from, of which it is given up first; calling it replays it."""

    graph: torch.cuda.CUDAGraph
    pool: torch.cuda.MemPool

    def __call__(self) -> None:
        self.graph.replay()

    def __del__(self) -> None:
        self.graph.reset()


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a card for warm-ups and captures: one a process, since cuBLAS keeps a workspace of 8 to 32 MiB for
    each stream that it was ever used on."""
    import torch

    return torch.cuda.Stream(device)


def machine_for(device: torch.device, *, clock: Clock | None = None, source: TelemetrySource | None = None) -> Machine:
    """The machine that a device belongs to; on CUDA the device becomes torch's current one."""
    kind = CudaMachine if device.type == "cuda" else Machine
    return kind(device, clock=clock, source=source)
