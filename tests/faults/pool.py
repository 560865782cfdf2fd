"""Calls in forked processes, a few at a time: each starts from the state of this process and cannot change it."""

from __future__ import annotations

import math
import multiprocessing
import resource
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Lost:
    """The reason why a call gave no answer."""

    why: str


def forked(calls: Sequence[Callable[[], Any]], *, jobs: int, limit_s: float) -> Iterator[tuple[int, Any]]:
    """Yield (number, answer) of each call as it ends; `Lost` if it exceeded the limit or died.

    The limit is in CPU time, which other processes do not affect. Calls that wait are ended if none ends within ten
    times the limit.
    """
    waiting = list(enumerate(calls))
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, call = waiting.pop(0)
                receiving, sending = _FORK.Pipe(duplex=False)
                process = _FORK.Process(target=_answer, args=(call, sending, limit_s))
                process.start()
                sending.close()
                running[receiving] = number, process
            for connection in wait(list(running), 10 * limit_s) or _killed(running):
                number, process = running.pop(connection)
                yield number, _received(connection, process)
    finally:
        _killed(running)


def _answer(call: Callable[[], Any], sending: Connection, limit_s: float) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s) + 5))
    try:
        answer = call()
    except BaseException:
        answer = Lost(traceback.format_exc())
    sending.send(answer)


def _received(connection: Connection, process: ForkProcess) -> Any:
    try:
        return connection.recv()
    except EOFError:
        process.join()
        return Lost(f"its process ended with {process.exitcode} (-9: it waited too long, -24: its CPU time ended)")
    finally:
        connection.close()
        process.join()


def _killed(running: dict[Connection, tuple[int, ForkProcess]]) -> list[Connection]:
    for _, process in running.values():
        process.kill()
    return list(running)
