"""The only door to a device: clock, memory, streams, captures and telemetry."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from profiler.device import memory
from profiler.device.clock import Clock, clock_for, now_s
from profiler.device.device import Device, describe, under_wsl
from profiler.device.telemetry import TelemetrySource, source_for
from profiler.errors import CaptureError, DeviceError, first_line

_SYNCHRONISES = "synchronizing CUDA operation"
"""The error of torch's synchronisation debug mode (c10/cuda/CUDAFunctions.cpp, `warn_or_error_on_sync`)."""


class Machine:
    """A CPU: its work has ended when the call returns, and nothing can be captured."""

    captures = False
    """Whether work can be recorded once and replayed without the host."""

    def __init__(
        self, device: torch.device, *, clock: Clock | None = None, source: TelemetrySource | None = None
    ) -> None:
        self.device = device
        self.clock = clock or clock_for(device)
        self._source = source
        self._has_peak = True

    @cached_property
    def source(self) -> TelemetrySource:
        return self._source or source_for(self.device)

    @cached_property
    def info(self) -> Device:
        return describe(self.device)

    @property
    def is_cuda(self) -> bool:
        return bool(self.device.type == "cuda")

    @property
    def links(self) -> tuple[str, ...]:
        """Names of what is linked to the device: `host` and the other cards (`cuda:N`); none for a CPU."""
        return ()

    @property
    def may_spill(self) -> bool:
        """Whether a request for more than the free memory may succeed and make all work slow, instead of failing."""
        return True

    def now_s(self) -> float:
        return now_s()

    def unix_s(self) -> float:
        return time.time()

    def available_bytes(self) -> int:
        return memory.available_bytes(self.device)

    def reset_peak(self) -> None:
        """Start a new peak measurement. Without it, as in some sandboxes, the peak is unknown."""
        try:
            memory.CLEAR_REFS.write_text(memory.RESET_PEAK)
        except OSError:
            self._has_peak = False

    def peak_bytes(self) -> int | None:
        """Return the peak of bytes in use since `reset_peak`: the allocator's, or on a CPU the process's; or None."""
        lines = memory.STATUS.read_text().splitlines() if self._has_peak else []
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)

    def allocated_bytes(self) -> int:
        """Return the bytes of the device that live tensors of this process occupy; 0 on a CPU, which does not count."""
        return 0

    def used_bytes(self) -> int | None:
        """Return the device's bytes in use by all, without unused blocks of this allocator; None on a CPU."""
        return None

    def release(self) -> None:
        """Return unused memory to the device, as after an out-of-memory error; on a CPU, malloc's to the system."""
        with contextlib.suppress(AttributeError, OSError):  # only glibc has malloc_trim(3)
            ctypes.CDLL(None).malloc_trim(0)

    def trouble(self) -> str:
        """Return why the device takes no more work, such as a card that fell off its bus; empty if it does."""
        return ""

    def recover(self, what: str) -> None:
        """Free the memory of `what`, which failed. Raises DeviceError if the device no longer works."""
        gc.collect()
        if trouble := self.trouble():
            raise DeviceError(f"the device stopped working after {what}: {trouble}; what was measured is kept.")
        with contextlib.suppress(RuntimeError):  # a device that works need not free its cache
            self.release()

    def waits(self, work: Callable[[], object]) -> bool:
        """Return whether `work` makes the host wait for the device; `work` ends at the first wait, without a trace."""
        return False

    def capture(self, work: Callable[[], object]) -> Recording:
        """Record `work`, which has run before, and return its replay. Raises CaptureError, and undoes what it did."""
        raise CaptureError("only a CUDA device captures work, and this one is a CPU.")

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Run what is within on a side stream, as CUDA requires of work before its capture."""
        yield

    def push_range(self, name: str) -> None:
        """Begin a range with a name in the device's profilers (NVTX on CUDA); `pop_range` ends it."""

    def pop_range(self) -> None:
        """End the range that began last."""


class CudaMachine(Machine):
    """A CUDA card: the host runs ahead of it, and its work can be captured as a graph."""

    captures = True

    def __init__(self, device: torch.device, *, source: TelemetrySource | None = None) -> None:
        super().__init__(device, source=source)
        # Streams, graphs and new tensors go to the current card, even if the model is on another.
        torch.cuda.set_device(device)
        self.info = describe(device)  # a card that does not answer ends the run before the model is loaded

    @property
    def links(self) -> tuple[str, ...]:
        others = (index for index in range(torch.cuda.device_count()) if index != (self.device.index or 0))
        return ("host", *(f"cuda:{index}" for index in others))

    @property
    def may_spill(self) -> bool:
        return under_wsl()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        return int(torch.cuda.max_memory_allocated(self.device))

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.device))

    def used_bytes(self) -> int | None:
        free, total = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(total - free) - int(cached)

    def release(self) -> None:
        clear_workspaces()  # a workspace of 32 MiB inside a larger block keeps the whole block
        torch.cuda.empty_cache()

    def trouble(self) -> str:
        found = ""
        for _ in range(2):
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:  # one that ends the context is raised by every later call, another one once
                found = first_line(error)
            else:
                return ""
        return found

    def waits(self, work: Callable[[], object]) -> bool:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns each time that this is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        except RuntimeError as error:
            if _SYNCHRONISES not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return False

    def capture(self, work: Callable[[], object]) -> Recording:
        # CUDA's own allocator (backend:cudaMallocAsync) has no MemPool; its graphs need an id only.
        pool = torch.cuda.MemPool() if torch.cuda.get_allocator_backend() == "native" else None
        pool_id = torch.cuda.graph_pool_handle() if pool is None else pool.id
        recorded = Recording(self, torch.cuda.CUDAGraph(), pool, pool_id)
        before = torch.cuda.current_stream()
        # torch keeps a workspace of cuBLAS per stream (aten/src/ATen/cuda/CublasHandlePool.cpp). With one of an earlier
        # graph's pool, this graph would write to freed memory once the earlier one is gone.
        clear_workspaces()
        try:
            try:
                with torch.cuda.graph(recorded.graph, pool=recorded.pool_id, stream=side_stream(self.device)):
                    work()
            finally:
                held_bytes = self.allocated_bytes()
                clear_workspaces()
        except RuntimeError as error:
            # torch.cuda.graph leaves its stream only after it has ended the capture, which raises.
            torch.cuda.set_stream(before)
            self._end_failed_capture(recorded)
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            first = error.__context__ or error  # ending a failed capture fails once more
            raise CaptureError(f"this cannot be captured as a CUDA graph: {first_line(first)}.") from error
        recorded.workspace_bytes = held_bytes - self.allocated_bytes()
        return recorded

    def _end_failed_capture(self, recorded: Recording) -> None:
        """Undo what a failed capture leaves in torch (the numbers are PyTorch's pull requests).

        Up to torch 2.12 the allocator stays in capture (180395), up to 2.13 the graph keeps its share of the pool
        (190348), and up to 2.11 the random generator stays in capture, so that the next number raises (176752).
        """
        index = self.device.index or 0
        recorded.graph.reset()
        with contextlib.suppress(RuntimeError):  # the installed torch has left the capture
            # torch 2.7 has another name for it than 2.8 to 2.15.
            end = getattr(torch._C, "_cuda_endAllocateToPool", None) or torch._C._cuda_endAllocateCurrentStreamToPool
            end(index, recorded.pool_id)
        with contextlib.suppress(RuntimeError):
            while recorded.pool is not None and recorded.pool.use_count() > 1:
                torch._C._cuda_releasePool(index, recorded.pool_id)
        with contextlib.suppress(RuntimeError):
            number = torch.zeros(1, device=self.device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side_stream(self.device)):
                number.add_(1)

    @property
    def is_lost(self) -> bool:
        """Whether the device takes no more work; False in a capture, which waiting for the device would end."""
        try:
            return not torch.cuda.is_current_stream_capturing() and self.trouble() != ""
        except RuntimeError:
            return True

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        side = side_stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield
        torch.cuda.current_stream().wait_stream(side)

    def push_range(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def pop_range(self) -> None:
        torch.cuda.nvtx.range_pop()


def clear_workspaces() -> None:
    """Free cuBLAS's workspaces, which its next call allocates again. A build without CUDA has no such function."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


@dataclass(eq=False)
class Recording:
    """A CUDA graph and its memory pool; a call replays the graph. The graph must be reset before the pool is freed."""

    machine: CudaMachine
    graph: torch.cuda.CUDAGraph
    pool: torch.cuda.MemPool | None
    pool_id: tuple[int, int]
    workspace_bytes: int = 0
    """Bytes of its pool that cuBLAS's kernels write in each replay, though torch's allocator counts them as free."""

    @property
    def pool_bytes(self) -> int:
        return memory.pool_bytes(self.machine.device, self.pool_id)

    def __call__(self) -> None:
        self.graph.replay()

    def __del__(self) -> None:
        # After an error that ends the CUDA context, the pool's C++ destructor throws, which ends the process: keep it.
        if self.machine.is_lost:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.pool))
        self.graph.reset()


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a card's only stream for captures: cuBLAS keeps 8 to 32 MiB for each stream that it was used on."""
    return torch.cuda.Stream(device)


def machine_for(device: torch.device, *, source: TelemetrySource | None = None) -> Machine:
    """Return the `Machine` of a device; on CUDA the device becomes torch's current one."""
    return CudaMachine(device, source=source) if device.type == "cuda" else Machine(device, source=source)


@contextlib.contextmanager
def recorded(*, cuda: bool) -> Iterator[Any]:
    """Record what runs within by torch.profiler, without stderr: Kineto bypasses Python's `sys.stderr`."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    was_on = torch.autograd._profiler_enabled()
    sys.stderr.flush()
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        with profile(activities=activities) as recording:
            yield recording
    finally:
        # After an error its exit waits for the device before it stops (torch 2.13, autograd/profiler.py). If that
        # raises, everything that follows would be recorded, and slower.
        if torch.autograd._profiler_enabled() and not was_on:
            torch.autograd._disable_profiler()
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
