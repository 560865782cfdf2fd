"""How much others used the CPU cores of this process while something was timed."""

from __future__ import annotations

import os
import time
from collections.abc import Collection

import psutil

from profiler.machine.clock import now_s

# The kernel counts CPU time in ticks of 10 ms; a shorter look would be mostly rounding.
_LEAST_S = 0.3


class ForeignLoad:
    """Starts to look when it is made."""

    def __init__(self) -> None:
        self._start_s = now_s()
        self._start = self._busy_s(), time.process_time()

    @property
    def watched(self) -> int:
        """Cores that are looked at: this process's set."""
        return len(_own_cores())

    def cores(self) -> float | None:
        """Cores of this process's set that others kept busy since; None when too little time has passed."""
        elapsed_s = now_s() - self._start_s
        if elapsed_s < _LEAST_S:
            return None
        busy_s = self._busy_s() - self._start[0]
        own_s = time.process_time() - self._start[1]
        return max(0.0, (busy_s - own_s) / elapsed_s)

    @staticmethod
    def _busy_s() -> float:
        """Seconds that the cores of this process's set have spent on anybody's work."""
        every, own = psutil.cpu_times(percpu=True), _own_cores()
        return sum(
            times.user + times.system + getattr(times, "nice", 0.0) + getattr(times, "steal", 0.0)
            for number, times in enumerate(every)
            if number in own
        )


def _own_cores() -> Collection[int]:
    """Cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
