"""CPU contention: how many cores other processes kept busy, and which processes those are."""

import functools
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from profiler.device.clock import Clock, now_s
from profiler.facts.telemetry import BusyProcess, Contention
from profiler.stats import NANOSECOND_S

SCHEDSTAT_FILE = Path("/proc/self/schedstat")
# The kernel counts CPU time in ticks of 10 ms; over a shorter time, rounding would dominate.
_LEAST_S = 0.3
_MOST_NAMED, _LEAST_NAMED_CORES = 3, 0.1


def waited_for_core_s() -> float:
    """Seconds that the main thread was ready while its core ran others (Linux, sched-stats.rst); 0 if unknown."""
    try:
        return int(os.pread(_opened(SCHEDSTAT_FILE, os.getpid()), 64, 0).split()[1]) * NANOSECOND_S
    except (OSError, IndexError, ValueError):
        return 0.0


@functools.cache
def _opened(file: Path, _process: int) -> int:
    """The descriptor of an open file: reading it takes a microsecond, and opening it takes fifteen."""
    return os.open(file, os.O_RDONLY)


def own_s() -> float:
    """The host's monotonic clock in seconds, which stops while the main thread waits for a core."""
    return now_s() - waited_for_core_s()


class OwnClock(Clock):
    """The clock of `own_s`."""

    def mark(self) -> int:
        return round(own_s() / NANOSECOND_S)


class ForeignLoad:
    """CPU load by others from construction on; `helper_pids` and, with `children`, own children are no others."""

    def __init__(self, helper_pids: Sequence[int] = (), *, children: bool = False) -> None:
        self._children = children
        self._helpers = helper_pids
        self._cores = os.sched_getaffinity(0).union(*map(_cores, helper_pids))
        self._start_s = now_s()
        self._foreign_s = self._busy_s() - self._own_s()

    @property
    def watched(self) -> int:
        """Number of observed cores: those that this process and its helpers may run on."""
        return len(self._cores)

    def cores(self) -> float | None:
        """Return the observed cores that others kept busy; None within 0.3 s, or if a container numbers its own."""
        elapsed_s = now_s() - self._start_s
        if elapsed_s < _LEAST_S or not self._cores <= set(_numbers()):
            return None
        return max(0.0, (self._busy_s() - self._own_s() - self._foreign_s) / elapsed_s)

    def _busy_s(self) -> float:
        return sum(
            times.user + times.system + times.nice + times.steal
            for number, times in zip(_numbers(), psutil.cpu_times(percpu=True), strict=False)
            if number in self._cores
        )

    def _own_s(self) -> float:
        own_s = time.process_time() + sum(map(_worked_s, self._helpers))
        if not self._children:
            return own_s
        ended, running = os.times(), psutil.Process().children(recursive=True)
        return own_s + ended.children_user + ended.children_system + sum(_worked_s(each.pid, True) for each in running)


def _numbers() -> list[int]:
    """The numbers of the CPUs in the order of psutil, which leaves out those that are offline."""
    lines = (Path(psutil.PROCFS_PATH) / "stat").read_text().splitlines()
    return [int(match[1]) for line in lines if (match := re.match(r"cpu(\d+) ", line))]


class Neighbours:
    """Other processes of this machine: what they take of this process's cores, by name, from look to look."""

    def __init__(self) -> None:
        self._begin()

    def look(self) -> Contention:
        """What others kept busy since the last look, or since construction; waits until that is 0.3 s ago."""
        time.sleep(max(0.0, _LEAST_S - (now_s() - self._since_s)))
        cores, elapsed_s, before = self._load.cores() or 0.0, now_s() - self._since_s, self._worked_s
        self._begin()
        busy = [
            BusyProcess(self._names[process], process[0], round((worked_s - before.get(process, 0.0)) / elapsed_s, 2))
            for process, worked_s in self._worked_s.items()
        ]
        named = sorted((item for item in busy if item.cores >= _LEAST_NAMED_CORES), key=lambda item: -item.cores)
        return Contention(round(cores, 2), self._load.watched, tuple(named[:_MOST_NAMED]), time.time())

    def _begin(self) -> None:
        self._since_s = now_s()
        self._load = ForeignLoad(children=True)
        own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        self._names, self._worked_s = dict[tuple[int, float], str](), dict[tuple[int, float], float]()
        for process in psutil.process_iter(["name", "create_time", "cpu_times"]):
            times, key = process.info["cpu_times"], (process.pid, process.info["create_time"])
            if process.pid not in own and times is not None:
                self._names[key], self._worked_s[key] = process.info["name"] or "?", times.user + times.system


def _worked_s(pid: int, with_children: bool = False) -> float:
    """CPU seconds of a process, optionally with those of the ended children that it has waited for; 0 if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + with_children * (times.children_user + times.children_system))


def _cores(pid: int) -> set[int]:
    try:
        return os.sched_getaffinity(pid)
    except OSError:  # the process is gone
        return set()
