"""The same small work again and again: when its time changes, the machine did, not the model."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from profiler.machine.clock import time_calls
from profiler.machine.machine import Machine
from profiler.roofs.sampling import attempt
from profiler.roofs.values import Look

_BUFFER_BYTES = 256 << 20
_SIDE = 1024
_CALLS = 7
_MOST_BURSTS = 6
_AGREE = 0.02


class Sentinel:
    """Holds its own buffers; a look takes a quarter of a second on a CPU. Raises DeviceError where the device is lost.

    Right after a large prefill memory is slower for a moment, by a fifth on a shared Xeon, whatever the machine does:
    a look waits until two bursts of calls in a row agree.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._calls: tuple[Callable[[], object], Callable[[], object]] | None = None
        self.missing: dict[str, str] = {}
        """Why there are no looks, where its buffers have no room."""
        with attempt("the sentinel", machine, self.missing):
            buffer = torch.rand(_BUFFER_BYTES // 4, device=machine.device)
            left, right = (torch.rand(_SIDE, _SIDE, device=machine.device) for _ in range(2))
            self._calls = buffer.sum, lambda: left @ right

    def look(self) -> Look | None:
        """Median seconds of reading the buffer and of one matrix product, once they have settled; None where that
        fails."""
        if self._calls is None:
            return None
        read, multiply = self._calls
        with attempt("the sentinel", self._machine, self.missing), torch.inference_mode():
            return Look(self._settled_s(read), self._settled_s(multiply), self._machine.unix_s())
        return None

    def _settled_s(self, call: Callable[[], object]) -> float:
        bursts = [statistics.median(time_calls(call, self._machine.clock, _CALLS))]
        while len(bursts) < _MOST_BURSTS:
            bursts.append(statistics.median(time_calls(call, self._machine.clock, _CALLS)))
            if abs(bursts[-1] / bursts[-2] - 1) < _AGREE:
                break
        return bursts[-1]
