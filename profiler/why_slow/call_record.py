"""The record of one call: its arguments, its thread, and the line of the script that made it."""

from __future__ import annotations

import sys
import sysconfig
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiler.device.clock import Clock
from profiler.why_slow.observations import CallKind

_PLACES_OF_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_NOT_THE_USERS = (
    *(str(Path(sysconfig.get_path(name)).resolve()) for name in _PLACES_OF_LIBRARIES),
    str(Path(__file__).parents[1]),
    "<frozen",
)


@dataclass
class CallRecord:
    """One call as it was noted: marks of the device's clock, and what a trial needs to call it again."""

    kind: CallKind
    model: weakref.ref[Any]
    where: str
    settings: dict[str, str]
    shape: tuple[int, int, int]
    """(sequences that are computed, tokens handed over, tokens in the cache)."""
    clock: Clock
    start: Any
    end: Any = None
    forwards: int = 0
    new_tokens: int = 0
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """What it was called with; None where that was not kept."""
    mask: Any = None
    name: str = ""
    callbacks: dict[str, float] = field(default_factory=dict)
    """Seconds in the user's own objects that it calls at every token, by their class."""
    began_s: float = 0.0
    ended_s: float = 0.0
    """By the host's clock, without waiting for the device."""
    thread: int = 0
    failed: str = ""
    """What it raised."""


@dataclass
class RepeatableCall:
    """How often something was done again, and what that took."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


@dataclass
class Thread(threading.local):
    depth: int = 0
    noted: CallRecord | None = None
    text_depth: int = 0
    load_depth: int = 0
    reading: bool = False
    last: str = ""
    """The line of the last call of a model."""


def users_line() -> str:
    """The line of the user's own code that led here: the nearest frame that is neither a library's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_THE_USERS) and "site-packages" not in name:
            # A notebook's cell is a file of a name that means nothing.
            return f"{'cell' if 'ipykernel_' in name else Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
