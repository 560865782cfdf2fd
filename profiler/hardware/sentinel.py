"""The same small work again and again: when its time changes, the machine did, not the model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch

from profiler.clock import Clock, time_calls

_BUFFER_BYTES = 256 << 20
_SIDE = 1024
_CALLS = 7

Reading = Mapping[str, float]
"""Seconds by what bounds the work: `memory` and `compute`."""


class Sentinel:
    """Holds its own buffers; a look takes about a tenth of a second on a CPU."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._clock = clock
        self._buffer = torch.rand(_BUFFER_BYTES // 4, device=device)
        self._left, self._right = (torch.rand(_SIDE, _SIDE, device=device) for _ in range(2))

    def look(self) -> Reading:
        """Median seconds of reading the buffer and of one matrix product."""
        with torch.inference_mode():
            return {
                "memory": statistics.median(time_calls(self._buffer.sum, self._clock, _CALLS)),
                "compute": statistics.median(time_calls(self._product, self._clock, _CALLS)),
            }

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
