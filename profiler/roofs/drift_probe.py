"""The drift probe: fixed work, timed repeatedly; a change in its time means that the machine's speed changed."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from profiler import effort
from profiler.device.clock import time_calls
from profiler.device.machine import Machine
from profiler.facts.roofs import DriftReading

PROBE_BYTES = 256 << 20
_SIDE = 1024
_AGREE = 0.02
# Limit in seconds for each kind of work in one reading; only a busy machine reaches it.
_MOST_S = 1.0


class DriftProbe:
    """Times memory reads and a matrix product, to detect changes in the machine's speed.

    It owns its buffers. A reading takes a quarter of a second on a CPU.

    Right after a large prefill, memory is slower for a moment on any machine, by a fifth on a shared Xeon. A reading
    therefore repeats bursts of calls until two in a row agree.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        limits = effort.STANDARD
        self._calls, self._most_bursts = limits.drift_calls, limits.drift_bursts
        self._buffer = torch.rand(PROBE_BYTES // 4, device=machine.device)
        self._left, self._right = (torch.rand(_SIDE, _SIDE, device=machine.device) for _ in range(2))

    def look(self) -> DriftReading:
        """Return the median seconds of one buffer read and of one matrix product, after they have settled."""
        with torch.inference_mode():
            memory_s, compute_s = self._settled_s(self._buffer.sum), self._settled_s(lambda: self._left @ self._right)
        return DriftReading(memory_s, compute_s, self._machine.unix_s())

    def _settled_s(self, call: Callable[[], object]) -> float:
        deadline_s = self._machine.now_s() + _MOST_S
        [first_s] = time_calls(call, self._machine.clock, 1)
        calls = max(1, min(self._calls, int(_MOST_S / first_s))) if first_s > 0 else self._calls
        bursts = [statistics.median(time_calls(call, self._machine.clock, calls))]
        while len(bursts) < self._most_bursts and self._machine.now_s() < deadline_s:
            bursts.append(statistics.median(time_calls(call, self._machine.clock, calls)))
            if abs(bursts[-1] / bursts[-2] - 1) < _AGREE:
                break
        return bursts[-1]
