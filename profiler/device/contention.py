"""CPU contention: how many cores other processes kept busy."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence

import psutil

from profiler.device.clock import now_s

# The kernel counts CPU time in ticks of 10 ms; a shorter look would be mostly rounding.
_LEAST_S = 0.3


class ForeignLoad:
    """Starts to look when it is made; processes `beside` this one work for it, and are not foreign, nor are this one's
    own `children`, where it may have some."""

    def __init__(self, beside: Sequence[int] = (), *, children: bool = False) -> None:
        self._children = children
        self._beside = [found for pid in beside if (found := _process(pid)) is not None]
        self._cores = set(_cores(None)).union(*(_cores(each) for each in self._beside))
        self._start_s = now_s()
        self._start = self._busy_s(), self._own_s()

    @property
    def watched(self) -> int:
        """Cores that are looked at: those that this process and those beside it may run on."""
        return len(self._cores)

    def cores(self) -> float | None:
        """Cores of those that others kept busy since; None when too little time has passed."""
        elapsed_s = now_s() - self._start_s
        if elapsed_s < _LEAST_S:
            return None
        busy_s = self._busy_s() - self._start[0]
        own_s = self._own_s() - self._start[1]
        return max(0.0, (busy_s - own_s) / elapsed_s)

    def _busy_s(self) -> float:
        """Seconds that the cores have spent on anybody's work."""
        return sum(
            times.user + times.system + getattr(times, "nice", 0.0) + getattr(times, "steal", 0.0)
            for number, times in enumerate(psutil.cpu_times(percpu=True))
            if number in self._cores
        )

    def _own_s(self) -> float:
        """Seconds that this process and those beside it have worked."""
        children_s = _children_s() if self._children else 0.0
        return time.process_time() + children_s + sum(_worked_s(each) for each in self._beside)


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _worked_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has ended
        return 0.0
    return float(times.user + times.system)


def _children_s() -> float:
    """Seconds that this process's children have worked, and theirs: those that run, and those that were waited for."""
    ended, running = os.times(), psutil.Process().children(recursive=True)
    return ended.children_user + ended.children_system + sum(_worked_s(each) + _waited_s(each) for each in running)


def _waited_s(process: psutil.Process) -> float:
    """Seconds that the children of a process worked which it has waited for."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0))


def _cores(process: psutil.Process | None) -> Collection[int]:
    """Cores that a process may run on; this one where none is named."""
    if not hasattr(os, "sched_getaffinity"):
        return range(os.cpu_count() or 1)
    try:
        return os.sched_getaffinity(process.pid if process else 0)
    except OSError:
        return ()
