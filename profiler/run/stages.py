"""The stages of a run: their times, their listener, and the parts that failed while it went on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Protocol

from profiler.device.machine import Machine
from profiler.errors import describe_error, tolerate_errors
from profiler.measure.sweep import Progress
from profiler.store.document import Missing
from profiler.units import clock_time


class Listener(Protocol):
    """Hears how a run goes; the terminal is one, a Python caller need not be."""

    def stage(self, text: str) -> None:
        """A new stage has begun."""

    def progress(self, progress: Progress, total_cells: int) -> None:
        """A cell is about to be visited."""


class Stages:
    """Reports each stage to a listener, and records how long it took."""

    def __init__(self, listener: Listener, machine: Machine) -> None:
        self.listener = listener
        self.machine = machine
        self.left_s: Callable[[], float] | None = None
        """Seconds to the end of the run, once they are known."""
        self._now = ""
        self._since_s = machine.now_s()
        self._spent_s: dict[str, float] = {}
        self.missing: list[Missing] = []

    def begin(self, name: str, text: str = "") -> None:
        """End the stage so far and begin the next; several of one name add up."""
        self._end()
        self._now = name
        left = "" if self.left_s is None else f", about {clock_time(self.left_s())} left"
        self.listener.stage(f"{text or name}{left}")

    def spent_s(self) -> dict[str, float]:
        """Seconds by stage, the one that goes on included."""
        self._end()
        return dict(self._spent_s)

    @contextlib.contextmanager
    def optional(self, what: str, effect: str) -> Iterator[None]:
        """Run a part that the step times do not need: where it fails the run goes on, and `missing` names it.

        `effect` says what its absence means for the figures. Raises DeviceError where the device is lost, and RankError
        where a rank is.
        """
        with tolerate_errors(lambda error: self.miss(what, describe_error(error), effect)):
            yield
            return
        self.machine.recover(what)

    def failed(self, what: str, error: Exception, effect: str) -> None:
        """Record that a part failed whose own caller goes on. Raises DeviceError where the device is lost since."""
        self.miss(what, describe_error(error), effect)
        self.machine.recover(what)

    def miss(self, what: str, why: str, effect: str) -> None:
        """Record that a part of the run failed; of several failures for one reason the first is kept."""
        if all((part.what, part.why) != (what, why) for part in self.missing):
            self.missing.append(Missing(what, why, effect))
            self.listener.stage(self.missing[-1].sentence)

    def _end(self) -> None:
        now_s = self.machine.now_s()
        if self._now and math.isfinite(now_s - self._since_s):
            self._spent_s[self._now] = self._spent_s.get(self._now, 0.0) + now_s - self._since_s
        self._since_s = now_s
