"""Machines for tests: this CPU with the test's clock or telemetry, or with a simulated memory that takes none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from profiler.device.contention import ForeignLoad
from profiler.device.device import Device
from profiler.device.machine import Machine, machine_for
from profiler.facts.ceilings import Ceiling

CPU = torch.device("cpu")
HOST = machine_for(CPU)


def ceiling(per_s: float) -> Ceiling:
    return Ceiling(per_s, per_s, per_s, 9, "given")


class FakeClock:
    """A clock whose every mark is one second after the previous one; or between whose marks are the given seconds."""

    ahead = False

    def __init__(self, *given: float) -> None:
        self.now, self.given = 0.0, list(given)

    def mark(self) -> float:
        self.now += 1.0
        return self.now

    def synchronize(self) -> None:
        pass

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return self.given or [after - before for before, after in itertools.pairwise(marks)]


class SmallMachine(Machine):
    """This CPU with an assumed cache of 1 MiB and 3 GiB of memory, so its ceilings are measured on small buffers."""

    @cached_property
    def info(self) -> Device:
        return replace(HOST.info, last_level_cache_bytes=1 << 20)

    def available_bytes(self) -> int:
        return 3 << 30


def small(**parts: Any) -> SmallMachine:
    """A SmallMachine whose clock or other `parts` the test supplies."""
    return SmallMachine(CPU, **parts)


@dataclass
class Others(ForeignLoad):
    """Other processes that keep `busy` of `watched` cores busy."""

    busy: float
    watched: int = 2

    def cores(self) -> float:
        return self.busy


_SIMULATED = {"sum", "copy_", "add", "mm", "addmm", "linear"}


class SimulatedMemory(FakeClock, TorchDispatchMode):
    """A torch mode with its own clock: an operation over n bytes takes `call_s` + n / `bytes_per_s(n)` seconds.

    Buffers are never filled, so they take no memory.
    """

    def __init__(self, bytes_per_s: Callable[[int], float], call_s: float = 0.0) -> None:
        FakeClock.__init__(self)
        TorchDispatchMode.__init__(self)
        self.bytes_per_s = bytes_per_s
        self.call_s = call_s
        self.now_s = 0.0
        self.footprints: dict[str, set[int]] = {}
        """The distinct byte counts that calls touched, by the operation's name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _SIMULATED:
            return func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        touched = sum({leaf.data_ptr(): leaf.nbytes for leaf in leaves}.values())
        self.footprints.setdefault(name, set()).add(touched)
        self.now_s += self.call_s + touched / self.bytes_per_s(touched)
        return args[0]

    def mark(self) -> float:
        return self.now_s


class SimulatedMachine(SmallMachine):
    """A machine with a `SimulatedMemory`, `available_bytes` of memory and a last-level cache of `cache_bytes`."""

    def __init__(self, memory: SimulatedMemory, available_bytes: int = 64 << 30, cache_bytes: int = 1 << 20) -> None:
        super().__init__(CPU, clock=memory)
        self._memory = memory
        self._available_bytes = available_bytes
        self._cache_bytes = cache_bytes

    @cached_property
    def info(self) -> Device:
        return replace(super().info, last_level_cache_bytes=self._cache_bytes)

    def now_s(self) -> float:
        return self._memory.now_s

    def available_bytes(self) -> int:
        return self._available_bytes
