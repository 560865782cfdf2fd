"""Calls in forked processes, a few at a time: each starts from the state of this process and cannot change it."""

from __future__ import annotations

import math
import os
import pickle
import resource
import selectors
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class _Child:
    number: int
    pid: int
    until_s: float
    parts: list[bytes]


@dataclass(frozen=True)
class Lost:
    """The reason why a call gave no answer."""

    why: str


def forked(calls: Sequence[Callable[[], Any]], *, jobs: int, limit_s: float) -> Iterator[tuple[int, Any]]:
    """Yield (number, answer) of each call as it ends; `Lost` if it exceeded the limit or died.

    The limit is in CPU time, which other processes do not affect. A call that waits ends after ten times the limit.
    """
    waiting = iter(enumerate(calls))
    selector = selectors.DefaultSelector()
    try:
        while True:
            while len(selector.get_map()) < jobs and (following := next(waiting, None)) is not None:
                number, call = following
                pid, reading = _start(call, limit_s)
                selector.register(
                    reading, selectors.EVENT_READ, _Child(number, pid, time.monotonic() + 10 * limit_s, [])
                )
            if not selector.get_map():
                return
            for key, _ in selector.select(timeout=1.0):
                if part := os.read(key.fd, 1 << 20):
                    key.data.parts.append(part)
                    continue
                selector.unregister(key.fd)
                yield key.data.number, _ended(key.fd, key.data)
            for key in list(selector.get_map().values()):
                if time.monotonic() > key.data.until_s:
                    os.kill(key.data.pid, signal.SIGKILL)
                    selector.unregister(key.fd)
                    _ended(key.fd, key.data)
                    yield key.data.number, Lost(f"it did not end within {10 * limit_s:g} s")
    finally:
        for key in list(selector.get_map().values()):
            os.kill(key.data.pid, signal.SIGKILL)
            _ended(key.fd, key.data)


def _start(call: Callable[[], Any], limit_s: float) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.close(reading)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s) + 5))
    try:
        answer = call()
    except BaseException:
        answer = Lost(traceback.format_exc())
    with open(writing, "wb") as file:
        pickle.dump(answer, file)
    os._exit(0)


def _ended(reading: int, child: _Child) -> Any:
    os.close(reading)
    _, status = os.waitpid(child.pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return Lost("it did not end within its CPU time")
    try:
        return pickle.loads(b"".join(child.parts))
    except (pickle.UnpicklingError, EOFError):
        return Lost(f"its process ended with {os.waitstatus_to_exitcode(status)}")
