"""Attention at KV lengths that are new to the process, next to the same lengths once more."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from profiler.device.machine import Machine


def first_and_second_s(
    machine: Machine, attention: Callable[[int], Callable[[], object]], lengths: Iterable[int]
) -> tuple[float, float]:
    """Return the median seconds of the first and of the second call of `attention(length)` at each length.

    The first length is left out, since it loads the kernel.
    """
    _, *pairs = [_two_calls_s(machine, attention(length)) for length in lengths]
    first_s, second_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    return first_s, second_s


def _two_calls_s(machine: Machine, attend: Callable[[], object]) -> tuple[float, float]:
    def call_s() -> float:
        machine.clock.synchronize()
        start_s = machine.now_s()
        attend()
        machine.clock.synchronize()
        return machine.now_s() - start_s

    return call_s(), call_s()
