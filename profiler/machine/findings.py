"""One line of `roofscope doctor`, and how a check becomes one whatever it raises."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from profiler.errors import first_line


@dataclass(frozen=True)
class Finding:
    """One part of an installation."""

    name: str
    works: bool | None
    """None: not needed here, or not tried because of what it needs."""
    says: str
    slow: bool = False
    """True: it works, and costs the time that the line names."""


def tried(name: str, check: Callable[[], Finding], otherwise: str = "") -> Finding:
    """What a check finds.

    Where it raises anything but an interruption: that it fails, why, and what that means for a run (`otherwise`).
    """
    try:
        with quietly():
            return check()
    except (Exception, SystemExit) as error:
        return Finding(name, False, "; ".join(filter(None, (first_line(error), otherwise))))


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep what libraries have to say off the screen: their warnings, logs and prints."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
