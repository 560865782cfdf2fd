"""Clocks: marks are set without synchronising and read afterwards, on CPU and CUDA."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import thread_time
from typing import TYPE_CHECKING, Any, Protocol

from profiler.stats import NANOSECOND_S

if TYPE_CHECKING:
    import torch


class Clock(Protocol):
    """Marks points in the device's own stream of work."""

    ahead: bool
    """Whether the host runs ahead of the device, so that a mark is reached later than it is set."""

    def mark(self) -> Any:
        """Note this point of the stream; costs no synchronisation."""

    def synchronize(self) -> None:
        """Wait until all work that was asked for is done."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Seconds between neighbouring marks; needs the marks to have been reached (synchronise first).

        Raises RuntimeError for marks that give no number.
        """


class HostClock:
    """The CPU's monotonic clock: work on a CPU has ended when its call returns."""

    ahead = False

    def mark(self) -> int:
        return time.perf_counter_ns()

    def synchronize(self) -> None:
        return None

    def seconds(self, marks: Sequence[int]) -> list[float]:
        return [round((after - before) * NANOSECOND_S, 9) for before, after in itertools.pairwise(marks)]


class CoreClock(HostClock):
    """The time that this thread has had a core for: what a neighbour takes of it does not count."""

    def mark(self) -> int:
        return time.thread_time_ns()


class CudaClock:
    """CUDA events on the current stream (resolution about 0.5 us)."""

    ahead = True

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cuda = torch.cuda
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        self._cuda.synchronize(self._device)

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        found = [round(before.elapsed_time(after) * 1e-3, 9) for before, after in itertools.pairwise(marks)]
        if any(map(math.isnan, found)):
            raise RuntimeError("CUDA's events gave no time")
        return found


def now_s() -> float:
    """The host's monotonic clock."""
    return time.perf_counter()


class OwnTime:
    """What a thread takes by itself from here on: wall seconds, less the turns that others had on its core.

    Where it never gave the core away of its own accord (getrusage(2), ru_nvcsw: it slept for nothing, and waited for
    nobody), what its core did not spend on it was others'. Where the system does not tell, all of it counts.
    """

    def __init__(self) -> None:
        self._waits = core_waits()
        self._core_s = thread_time()
        self._start_s = now_s()

    def seconds(self) -> float:
        wall_s = now_s() - self._start_s
        core_s = thread_time() - self._core_s
        waits = core_waits()
        return wall_s if waits is None or waits != self._waits else min(wall_s, core_s)


def core_waits() -> int | None:
    """How often this thread has given its core away of its own accord; None where that is not counted."""
    try:
        import resource

        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    except (ImportError, AttributeError):  # not Linux
        return None


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def time_calls(call: Callable[[], object], clock: Clock, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls in a row, with no synchronisation between them.

    Where the host runs ahead of the device one more call goes before them: an idle device would be timed waiting for
    the first launch.
    """
    if clock.ahead:
        call()
    marks = [clock.mark()]
    for _ in range(repeats):
        call()
        marks.append(clock.mark())
    clock.synchronize()
    return clock.seconds(marks)


@contextmanager
def no_gc() -> Iterator[None]:
    """Python's collector may stop a step for milliseconds; it runs outside instead."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def instrument_s(clock: Clock, marks: int = 1000) -> float:
    """Seconds that one mark costs the host: what timing adds to a step (median of five rounds)."""
    rounds = []
    for _ in range(5):
        start = now_s()
        for _ in range(marks):
            clock.mark()
        rounds.append((now_s() - start) / marks)
        clock.synchronize()
    return sorted(rounds)[len(rounds) // 2]
