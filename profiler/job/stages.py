"""How a run goes: who hears of it, how long each stage took, and what may fail without costing a figure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from profiler.errors import contained, told
from profiler.machine.machine import Machine
from profiler.timing.sweep import Progress


class Listener(Protocol):
    """Hears how a run goes; the terminal is one, a Python caller need not be."""

    def stage(self, text: str) -> None:
        """A new stage has begun."""

    def progress(self, progress: Progress, total_cells: int) -> None:
        """A cell is about to be visited."""


class Stages:
    """Tells a listener what goes on, and keeps how long each stage took."""

    def __init__(self, listener: Listener, machine: Machine) -> None:
        self.listener = listener
        self.machine = machine
        self._now = ""
        self._since_s = machine.now_s()
        self._spent_s: dict[str, float] = {}

    def begin(self, name: str, text: str = "") -> None:
        """End the stage so far and begin the next; several of one name add up."""
        self._end()
        self._now = name
        self.listener.stage(text or name)

    def spent_s(self) -> dict[str, float]:
        """Seconds by stage, the one that goes on included."""
        self._end()
        return dict(self._spent_s)

    @contextlib.contextmanager
    def cut_short(self, what: str) -> Iterator[None]:
        """What is measured beside the sweep ends early where memory runs out or it fails; the sweep's figures stand.

        Raises DeviceError where the device is lost.
        """
        with contained(lambda error: self.listener.stage(f"{what} ended early: {told(error)}")):
            yield
            return
        self.machine.recover(what)

    def _end(self) -> None:
        now_s = self.machine.now_s()
        if self._now:
            self._spent_s[self._now] = self._spent_s.get(self._now, 0.0) + now_s - self._since_s
        self._since_s = now_s
