"""The same small work again and again: when its time changes, the machine did, not the model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from profiler.machine.clock import Clock, time_calls

_BUFFER_BYTES = 256 << 20
_SIDE = 1024
_CALLS = 7
_MOST_BURSTS = 6
_AGREE = 0.02

Reading = Mapping[str, float]
"""Seconds by what bounds the work: `memory` and `compute`."""


class Sentinel:
    """Holds its own buffers; a look takes a quarter of a second on a CPU.

    Right after a large prefill memory is slower for a moment, by a fifth on a shared Xeon, whatever the machine does:
    a look waits until two bursts of calls in a row agree.
    """

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._clock = clock
        self._buffer = torch.rand(_BUFFER_BYTES // 4, device=device)
        self._left, self._right = (torch.rand(_SIDE, _SIDE, device=device) for _ in range(2))

    def look(self) -> Reading:
        """Median seconds of reading the buffer and of one matrix product, once they have settled."""
        with torch.inference_mode():
            return {"memory": self._settled_s(self._buffer.sum), "compute": self._settled_s(self._product)}

    def _settled_s(self, call: Callable[[], object]) -> float:
        bursts = [statistics.median(time_calls(call, self._clock, _CALLS))]
        while len(bursts) < _MOST_BURSTS:
            bursts.append(statistics.median(time_calls(call, self._clock, _CALLS)))
            if abs(bursts[-1] / bursts[-2] - 1) < _AGREE:
                break
        return bursts[-1]

    def _product(self) -> torch.Tensor:
        return self._left @ self._right


def drift(readings: Sequence[Reading]) -> float:
    """By how much the machine changed from the first half of the looks to the second, as a share.

    Medians are compared, since a single look may be disturbed; the larger change of both kinds counts.
    """
    half = len(readings) // 2
    if not half:
        return 0.0
    changes = []
    for kind in readings[0]:
        before, after = (statistics.median(r[kind] for r in part) for part in (readings[:half], readings[half:]))
        changes.append(abs(after / before - 1))
    return max(changes)
