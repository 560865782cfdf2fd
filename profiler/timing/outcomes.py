"""What a visit of a cell leaves behind: its times, or why there are none. Plain values, which a run folder keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from profiler.grid import Cell

Status = Literal["ok", "oom", "skipped", "failed"]


@dataclass(frozen=True)
class Visit:
    """One visit of one cell: a prefill and the decode loop behind it, as they were measured."""

    cell: Cell
    round: int
    prefill_s: float
    decode_s: tuple[float, ...]
    """Seconds of each decode step; the first one is kept apart by readers, since it pays for the first growth."""
    wall_s: float
    """The host's clock around prefill and loop together, with a synchronisation at both ends."""
    warm_up_s: tuple[float, ...]
    peak_memory_bytes: int | None
    at_unix_s: float
    energy_j: float | None = None
    """Joules that the device took for prefill and loop together, where it counts them."""


@dataclass(frozen=True)
class Gap:
    """A cell without a number, and why."""

    cell: Cell
    status: Status
    reason: str
