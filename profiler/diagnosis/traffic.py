"""A device as forecasts know it: what its memory and its host take for many steps at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from profiler.diagnosis.columns import Array, Demanded, OperatorColumn, Steps, by_phase
from profiler.diagnosis.step_time import Dispatch
from profiler.grid import Phase
from profiler.roofs.values import Ceilings
from profiler.work.causes import OUTSIDE, Cause

_READ_AND_WRITTEN = 2


@dataclass(frozen=True)
class Device:
    """What a forecast knows of a device beyond single kernels."""

    ceilings: Ceilings
    dtype: str
    """The model's."""
    dispatch: Mapping[Phase, Mapping[int, Dispatch]]
    """By batch size; empty where it was not measured."""
    overlaps: bool
    memory_bytes: int
    fetch_s: float = 0.0

    def memory_bytes_per_s(self, working_set_bytes: Array) -> Array:
        """`Ceilings.memory_bytes_per_s_for` of many working sets."""
        ceilings = self.ceilings
        if not ceilings.curve:
            return np.full(len(working_set_bytes), ceilings.memory_bytes_per_s)
        ascending = sorted(ceilings.curve, key=lambda point: point.nbytes)
        sizes = np.array([point.nbytes for point in ascending])
        gains = np.array([*(point.bytes_per_s / ceilings.curve[-1].bytes_per_s for point in ascending), 1.0])
        larger = np.searchsorted(sizes, working_set_bytes, side="left")
        return np.asarray(ceilings.memory_bytes_per_s * np.maximum(1.0, gains[larger]))

    def between_bytes_per_s(self, demanded: Demanded) -> Array:
        """Bytes/s between kernels: what one writes the next reads, from the cache that holds both where one does.

        The curve's small sizes are read in less time than a call takes, which is no cache's speed: what a larger size
        reaches, a smaller one does.
        """
        if demanded.handed_bytes is None or not self.ceilings.curve:
            return self.memory_bytes_per_s(demanded.working_set_bytes)
        descending = sorted(self.ceilings.curve, key=lambda point: -point.nbytes)
        end = self.ceilings.curve[-1].bytes_per_s
        reached = np.maximum.accumulate([point.bytes_per_s / end for point in descending])
        sizes = np.array([point.nbytes for point in descending])[::-1]
        larger = np.searchsorted(sizes, _READ_AND_WRITTEN * demanded.handed_bytes, side="left")
        gains = np.append(reached[::-1], 1.0)
        return np.asarray(self.ceilings.memory_bytes_per_s * np.maximum(1.0, gains[larger]))

    def dispatched(self, steps: Steps) -> tuple[Array, Array]:
        """(seconds to dispatch each step, the part of them that replayed kernels pay as well)."""
        whole, inside = np.zeros(len(steps)), np.zeros(len(steps))
        for phase, chosen in by_phase(steps):
            known = sorted(self.dispatch.get(phase, {}).items())
            if known:
                batches = np.log2([batch for batch, _ in known])
                at = np.log2(steps.batch[chosen])
                whole[chosen] = np.interp(at, batches, [item.step_s for _, item in known])
                inside[chosen] = np.interp(at, batches, [item.in_kernels_s for _, item in known])
        return whole, inside


def from_memory_s(demanded: Demanded, device: Device, replayed: Callable[[OperatorColumn], bool]) -> Array:
    """Seconds that the memory would take for all traffic that no replay has paid for: between the operators, and of
    those that are not `replayed` themselves."""
    parts = [unpaid_from_memory_s(column, device, replayed(column)) for column in demanded.columns]
    return np.asarray(sum(parts, np.zeros(len(demanded.steps))))


def unpaid_from_memory_s(column: OperatorColumn, device: Device, replayed: bool) -> Array:
    """The same of one operator."""
    bandwidth = np.full(len(column.rows), device.ceilings.memory_bytes_per_s)
    own_s = 0.0 if replayed else column.model_bytes / bandwidth
    copies = device.ceilings.copy_share * bandwidth
    return np.asarray(own_s + unpaid_s(column, math.inf, copies, bandwidth, replayed))


def unpaid_s(column: OperatorColumn, flops_per_s: float, copies: Array, between: Array, replayed: bool) -> Array:
    """Seconds of an operator's avoidable work that its own replay has not paid for.

    What one kernel writes the next one finds (`between` bytes/s); of a cache that is copied (`copies`) the old one lies
    where the step before left it.
    """
    moved = {Cause.OPERANDS: column.activation_bytes, **column.avoidable_bytes}
    total = np.zeros(len(between))
    for cause in {**moved, **column.avoidable_flops}:
        if replayed and cause not in OUTSIDE:
            continue
        flops, nbytes = column.avoidable_flops.get(cause, 0.0), moved.get(cause, 0.0)
        bytes_per_s = copies if cause is Cause.CACHE_COPIES else between
        total += np.maximum(np.asarray(flops) / flops_per_s, np.asarray(nbytes) / bytes_per_s)
    return total
