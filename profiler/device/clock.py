"""Clocks for CPU and CUDA: marks are set without synchronising and read afterwards."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from time import thread_time
from typing import TYPE_CHECKING, Any

from profiler.patching import switched
from profiler.stats import NANOSECOND_S

if TYPE_CHECKING:
    import torch


class Clock:
    """Marks points in the device's stream of work: the host's monotonic clock, as a CPU's work ends with its call."""

    ahead = False
    """Whether the host runs ahead of the device: a mark is then reached later than it is set."""

    def mark(self) -> Any:
        """Mark this point of the stream, without synchronising."""
        return time.perf_counter_ns()

    def synchronize(self) -> None:
        """Wait until all submitted work is done."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the seconds between marks; synchronise first. Raises RuntimeError if the marks give no number."""
        return [round((after - before) * NANOSECOND_S, 9) for before, after in itertools.pairwise(marks)]


class CoreClock(Clock):
    """CPU time of this thread: time in which other threads use its core does not count."""

    def mark(self) -> int:
        return time.thread_time_ns()


class CudaClock(Clock):
    """CUDA events on the current stream (resolution about 0.5 µs)."""

    ahead = True

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cuda, self._device = torch.cuda, device

    def mark(self) -> torch.cuda.Event:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        self._cuda.synchronize(self._device)

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        seconds = [round(before.elapsed_time(after) * 1e-3, 9) for before, after in itertools.pairwise(marks)]
        if any(map(math.isnan, seconds)):
            raise RuntimeError("CUDA's events gave no time")
        return seconds


def now_s() -> float:
    """Return the host's monotonic clock in seconds."""
    return time.perf_counter()


def core_timer() -> Callable[[], float]:
    """Return a function of this thread's seconds since now, without those in which others had the core or the lock.

    The thread must wait for nothing else.
    """
    core_s, start_s = thread_time(), now_s()
    return lambda: min(now_s() - start_s, thread_time() - core_s)


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else Clock()


def time_calls(
    call: Callable[[], object], clock: Clock, repeats: int, *, group: int = 1, drop_first: bool | None = None
) -> list[float]:
    """Return the seconds per call of `repeats` consecutive groups of calls, with no synchronisation between them.

    A mark after each short call would add its cost to all. With `drop_first`, an untimed call goes first, since an idle
    device waits for its first launch; by default it does if the host runs ahead.
    """
    if clock.ahead if drop_first is None else drop_first:
        call()
    marks = [clock.mark()]
    for _ in range(repeats):
        for _ in range(group):
            call()
        marks.append(clock.mark())
    clock.synchronize()
    return [seconds / group for seconds in clock.seconds(marks)]


def time_apart(
    call: Callable[[], object], clock: Clock, repeats: int, *, flush: Callable[[], object] | None = None
) -> list[float]:
    """Return the seconds of each of `repeats` calls, on an idle device and right after a `flush`."""
    marks = []
    for _ in range(repeats):
        clock.synchronize()
        if flush is not None:
            flush()
        marks.append(clock.mark())
        call()
        marks.append(clock.mark())
    clock.synchronize()
    return clock.seconds(marks)[::2]


def first_and_second_s(
    clock: Clock, attention: Callable[[int], Callable[[], object]], lengths: Iterable[int]
) -> tuple[float, float]:
    """Return the median seconds of first and second calls at each length but the first, which loads the kernel."""
    _, *pairs = [time_apart(attention(length), clock, 2) for length in lengths]
    first_s, second_s = zip(*pairs, strict=True)
    return statistics.median(first_s), statistics.median(second_s)


def waited_s(
    run: Callable[[], object], synchronize: Callable[[], object], repeats: int = 1, *, now: Callable[[], float] = now_s
) -> float:
    """Return the seconds per run by a clock of the host, until the device is done."""
    start_s = now()
    for _ in range(repeats):
        run()
    synchronize()
    return (now() - start_s) / repeats


def no_gc() -> AbstractContextManager[None]:
    """Disable Python's garbage collector within: it may stop a step for milliseconds."""
    return switched(lambda on: gc.enable() if on else gc.disable(), False, gc.isenabled())


def instrument_s(clock: Clock, marks: int = 1000) -> float:
    """Return the seconds that one mark costs the host, which timing adds to a step (median of five rounds)."""
    rounds = []
    for _ in range(5):
        rounds.append(waited_s(clock.mark, lambda: None, marks))
        clock.synchronize()
    return statistics.median(rounds)
