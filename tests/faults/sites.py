"""Sites: the places where a run calls into a device, a driver, a library or the disk, with names for replays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import profiler

ROOT = f"{Path(profiler.__file__).parent}/"
_SIMULATED = f"{Path(__file__).parents[1]}/simulated/"
_DOORS = frozenset(f"{ROOT}device/{name}.py" for name in ("clock", "machine", "memory"))
"""Modules through which every package calls a device; the site is their caller."""


@dataclass(frozen=True, order=True)
class Site:
    """One API, called by one line of the profiler."""

    api: str
    place: str
    """File below profiler/ and line, as `measure/sweep.py:205`."""

    def __str__(self) -> str:
        return f"{self.api}@{self.place}"


@dataclass(frozen=True)
class Call:
    """One call at a site."""

    site: Site
    number: int
    """The number of the call at its site, counted from 1 in each run."""
    stage: str
    """The stage of the run (`profiler.run.stages.Stages.begin`)."""
    cell: str
    """The visited cell, as `engine/batch/depth`; empty between visits."""


@dataclass(frozen=True, order=True)
class Injection:
    """One fault at one call of one scenario: `API@file:line#n kind once|on scenario`."""

    site: Site
    number: int
    kind: str
    mode: str
    """`once`: only this call; `on`: this call and all later ones at its site."""
    scenario: str

    def __str__(self) -> str:
        return f"{self.site}#{self.number} {self.kind} {self.mode} {self.scenario}"

    def hits(self, site: Site, number: int) -> bool:
        return site == self.site and (number == self.number if self.mode == "once" else number >= self.number)


def place_of(frame: FrameType | None) -> str | None:
    """Return the nearest line of the profiler outside the door modules.

    Return a line of a door module if there is no other, and None outside the profiler.
    """
    door = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT):
            place = f"{name[len(ROOT) :]}:{frame.f_lineno}"
            if name not in _DOORS:
                return place
            door = door or place
        frame = frame.f_back
    return door


def from_simulator(frame: FrameType) -> bool:
    """Return whether the simulated card makes the call, not the code that runs on it."""
    return frame.f_code.co_filename.startswith(_SIMULATED)


def caller(depth: int) -> FrameType:
    return sys._getframe(depth + 1)


def positions(numbers: Sequence[int]) -> list[int]:
    """Return the first, the middle and the last of some calls, in order."""
    return sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
