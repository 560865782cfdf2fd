"""Other processes that kept this machine's cores busy."""

from __future__ import annotations

from dataclasses import dataclass

from profiler.facts.fact import Fact
from profiler.units import several

# As much of one core goes to the system's own work on an idle machine.
_SYSTEM_CORES = 0.25
# Processes that keep at least this share of the busy cores explain them.
_EXPLAINED = 0.5


@dataclass(frozen=True, slots=True)
class BusyProcess:
    """A process and the cores that it kept busy."""

    name: str
    pid: int
    cores: float

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


@dataclass(frozen=True)
class Contention(Fact, kind="contention"):
    """Cores that other processes kept busy over some time."""

    cores: float
    of_cores: int
    """The cores that this process may run on."""
    processes: tuple[BusyProcess, ...] = ()
    """The busiest of them; empty where they cannot be seen, as in another container or virtual machine."""
    at_unix_s: float = 0.0

    def disturbs(self, threads: int) -> bool:
        """Whether others leave fewer cores than `threads`."""
        return self.cores + threads > self.of_cores + _SYSTEM_CORES

    @property
    def busy_cores(self) -> str:
        """Such as `1.0 of 2 cores`."""
        return f"{self.cores:.1f} of {several(self.of_cores, 'core', 'cores')}"

    @property
    def who(self) -> str:
        """The processes by name, or a word for those that cannot be seen."""
        if not self.processes or sum(process.cores for process in self.processes) < _EXPLAINED * self.cores:
            return "other work (not visible from here)"
        *others, last = map(str, self.processes)
        return f"{', '.join(others)} and {last}" if others else last
