"""The stages of a run: their times, their listener, and the parts that failed meanwhile."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Protocol

from profiler.device.machine import Machine
from profiler.errors import describe_error, tolerate_errors
from profiler.measure.sweep import Progress
from profiler.store.document import Missing
from profiler.units import time_left


class Listener(Protocol):
    """Receives the progress of a run; the terminal implements it, and Python callers may."""

    def stage(self, text: str) -> None:
        """Called when a stage begins."""

    def progress(self, progress: Progress, total_cells: int) -> None:
        """Called before a cell is visited."""


class Stages:
    """Reports each stage to a listener, and records how long it took."""

    def __init__(self, listener: Listener, machine: Machine, before_s: float = 0.0) -> None:
        """The command took `before_s` until now, mostly with imports."""
        self.listener = listener
        self.machine = machine
        self.left_s: Callable[[], float] | None = None
        """Returns the seconds to the end of the run; None until they can be estimated."""
        self._now = ""
        self._since_s = machine.now_s()
        self._spent_s = {"starting": before_s} if before_s else {}
        self.missing: list[Missing] = []

    def begin(self, name: str, text: str = "") -> None:
        """End the current stage and begin the next; times of stages with the same name add up."""
        self._end()
        self._now = name
        left = "" if self.left_s is None else f", {time_left(self.left_s())}"
        self.listener.stage(f"{text or name}{left}")

    def spent_s(self) -> dict[str, float]:
        """Return the seconds by stage, including the current one."""
        self._end()
        return dict(self._spent_s)

    @contextlib.contextmanager
    def optional(self, what: str, effect: str) -> Iterator[None]:
        """Context manager for a part without which the run continues: its failure is recorded in `missing`.

        `effect` says what its absence means for the figures. Raises DeviceError if the device is lost.
        """
        with tolerate_errors(lambda error: self.miss(what, describe_error(error), effect)):
            yield
            return
        self.machine.recover(what)

    def failed(self, what: str, error: Exception, effect: str) -> None:
        """Record that a part failed although its caller continues. Raises DeviceError if the device is lost."""
        self.miss(what, describe_error(error), effect)
        self.machine.recover(what)

    def miss(self, what: str, why: str, effect: str) -> None:
        """Record that a part of the run failed; only the first of several failures with one reason is recorded."""
        if all((part.what, part.why) != (what, why) for part in self.missing):
            self.missing.append(Missing(what, why, effect))
            self.listener.stage(self.missing[-1].sentence)

    def _end(self) -> None:
        now_s = self.machine.now_s()
        if self._now and math.isfinite(now_s - self._since_s):
            self._spent_s[self._now] = self._spent_s.get(self._now, 0.0) + now_s - self._since_s
        self._since_s = now_s
