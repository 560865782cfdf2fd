"""Machines for tests: this CPU, optionally with the test's clock or telemetry."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from profiler.device.contention import ForeignLoad
from profiler.device.device import Device
from profiler.device.machine import Machine, machine_for
from profiler.facts.roofs import Roof

CPU = torch.device("cpu")
HOST = machine_for(CPU)


def roof(per_s: float) -> Roof:
    """A roof that is known exactly."""
    return Roof(per_s, per_s, per_s, 9, "given")


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
    """This CPU with an assumed cache of 1 MiB and 3 GiB of memory, so its roofs are measured on small buffers."""

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
