"""The simulated host: one clock that advances only with work, and threads that sleep on this clock."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from time import strftime
from typing import Any

from .native import native
from .truth import Stolen


class Host:
    """The clock of the simulated host, and its sleeping threads."""

    def __init__(self, stolen: Stolen) -> None:
        self.core = native().Host()
        self.core.stolen_every_s, self.core.stolen_for_s = stolen.every_s, stolen.seconds
        self.unix_at_start_s = 1.8e9 - self.now_s
        self.sync_debug_mode = 0
        """torch's reaction to a call that waits for a card: 2 is an error."""
        self.terminated_by: RuntimeError | None = None
        self._sleepers: list[Sleep] = []
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
        """Advance the clock."""
        self.core.advance(seconds)

    def wait_until(self, moment_s: float) -> None:
        """Advance the clock to a time; sleeping threads wake in order."""
        self.core.wait_until(moment_s)

    def _wake_until(self, moment_s: float) -> None:
        while due := [sleep for sleep in self._sleepers if sleep.until_s <= moment_s]:
            first = min(due, key=lambda sleep: sleep.until_s)
            self.core.now_s = max(self.now_s, first.until_s)
            first.wake()

    def sleep_until(self, moment_s: float) -> Sleep:
        sleep = Sleep(self, moment_s)
        self._sleepers.append(sleep)
        self._look_ahead()
        return sleep

    def forget(self, sleep: Sleep) -> None:
        if sleep in self._sleepers:
            self._sleepers.remove(sleep)
            self._look_ahead()

    def _look_ahead(self) -> None:
        self.core.wake_s = min((sleep.until_s for sleep in self._sleepers), default=math.inf)


class Sleep:
    """A sleeping thread. The thread that wakes it waits until it sleeps again or ends, so only one thread runs at a
    time."""

    def __init__(self, host: Host, until_s: float) -> None:
        self.until_s = until_s
        self._host = host
        self._woken = threading.Event()
        self.settled = threading.Event()

    def wake(self) -> None:
        self._host.forget(self)
        self._woken.set()
        self.settled.wait()

    def wait(self) -> None:
        self._woken.wait()


class SimulatedTime:
    """Replaces the module `time`; a missing name is an error."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.monotonic = self.process_time = lambda: host.now_s
        self.time = lambda: host.unix_at_start_s + host.now_s
        self.thread_time_ns = lambda: round((host.now_s - host.core.stolen_s) * 1e9)
        self.perf_counter_ns = lambda: round(host.now_s * 1e9)
        self.sleep = host.advance

    def perf_counter(self) -> float:
        return self._host.now_s

    strftime = staticmethod(strftime)


class SimulatedThreading:
    """Replaces the module `threading`: threads that wait for an event with a timeout sleep on the host's clock."""

    def __init__(self, host: Host) -> None:
        last: dict[threading.Thread, Sleep] = {}

        def settle(thread: threading.Thread) -> None:
            """Let the thread that woke this one continue."""
            if thread in last:
                last.pop(thread).settled.set()

        class Event:
            def __init__(self) -> None:
                self._set = False
                self._sleep: Sleep | None = None

            def set(self) -> None:
                self._set = True
                if self._sleep is not None:
                    self._sleep.wake()

            def wait(self, timeout: float) -> bool:
                if self._set:
                    return True
                thread = threading.current_thread()
                mine = self._sleep = host.sleep_until(host.now_s + timeout)
                settle(thread)
                last[thread] = mine
                mine.wait()
                self._sleep = None
                return self._set

        class Thread:
            def __init__(self, *, target: Callable[[], Any], name: str, daemon: bool) -> None:
                self._target = target
                self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
                self._begun = Sleep(host, 0.0)

            def _run(self) -> None:
                last[threading.current_thread()] = self._begun
                try:
                    self._target()
                finally:
                    settle(threading.current_thread())

            def start(self) -> None:
                self._thread.start()
                self._begun.settled.wait()

            def join(self, timeout: float | None = None) -> None:
                self._thread.join(timeout)

        self.Event = Event
        self.Thread = Thread
