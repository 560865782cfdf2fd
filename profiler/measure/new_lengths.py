"""Attention at KV lengths that are new to the process, next to the same lengths once more."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from profiler.device.clock import time_in_turn
from profiler.device.machine import Machine


def first_and_second_s(
    machine: Machine, attention: Callable[[int], Callable[[], object]], lengths: Iterable[int]
) -> tuple[float, float]:
    """Return the median seconds of the first and of the second call of `attention(length)` at each length.

    The first length is left out, since it loads the kernel.
    """
    _, *pairs = [time_in_turn([attention(length)], machine.clock, 2)[0] for length in lengths]
    first_s, second_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    return first_s, second_s
