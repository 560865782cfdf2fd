"""The simulated host: one clock that advances only with work, and what it calls again and again."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import strftime

from .native import native


@dataclass(eq=False)
class Alarm:
    next_s: float
    every_s: float
    call: Callable[[], None]


class Host:
    def __init__(self) -> None:
        self.core = native().Host()
        self.unix_at_start_s = 1.8e9 - self.now_s
        self.sync_debug_mode = 0
        """torch's reaction to a call that waits for a card: 2 is an error."""
        self.terminated_by: RuntimeError | None = None
        self._alarms: list[Alarm] = []
        me = weakref.ref(self)
        self.core.wake = lambda moment_s: me()._wake_until(moment_s)  # type: ignore[union-attr]

    @property
    def now_s(self) -> float:
        return self.core.now_s

    def note_wait(self) -> None:
        """Record a wait for a value, a plain copy or a stream; events and whole cards need no such record.

        Raises RuntimeError if the debug mode forbids it (c10/cuda/CUDAFunctions.h: `memcpy_and_sync` and
        `stream_synchronize` call `warn_or_error_on_sync`).
        """
        if self.sync_debug_mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")

    @contextlib.contextmanager
    def terminating(self) -> Iterator[None]:
        """A C++ destructor: an error in it would end the process, so it is raised when the simulation ends."""
        try:
            yield
        except RuntimeError as error:
            self.terminated_by = error

    def advance(self, seconds: float) -> None:
        self.core.advance(seconds)

    def wait_until(self, moment_s: float) -> None:
        """Advance the clock to a time; the calls that are due until then are made in order."""
        self.core.wait_until(moment_s)

    def every(self, seconds: float, call: Callable[[], None]) -> Alarm:
        """Call a function each time that so many seconds have passed, until the alarm is forgotten."""
        alarm = Alarm(self.now_s + seconds, seconds, call)
        self._alarms.append(alarm)
        self._look_ahead()
        return alarm

    def forget(self, alarm: Alarm) -> None:
        self._alarms.remove(alarm)
        self._look_ahead()

    def _wake_until(self, moment_s: float) -> None:
        while due := [alarm for alarm in self._alarms if alarm.next_s <= moment_s]:
            first = min(due, key=lambda alarm: alarm.next_s)
            self.core.now_s = max(self.now_s, first.next_s)
            first.next_s = self.now_s + first.every_s
            first.call()
        self._look_ahead()

    def _look_ahead(self) -> None:
        self.core.wake_s = min((alarm.next_s for alarm in self._alarms), default=math.inf)


class SimulatedTime:
    """Replaces the module `time`; a missing name is an error."""

    def __init__(self, host: Host) -> None:
        self.monotonic = self.process_time = self.perf_counter = lambda: host.now_s
        self.time = lambda: host.unix_at_start_s + host.now_s
        self.thread_time_ns = self.perf_counter_ns = lambda: round(host.now_s * 1e9)
        self.sleep, self.strftime = host.advance, strftime
