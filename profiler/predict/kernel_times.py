"""Kernel times at new shapes, interpolated from a run's replays, and memory traffic per operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from profiler.counting.floor import floor_s
from profiler.facts.dispatch import Dispatch
from profiler.facts.operators import OUTSIDE, REST, Cause
from profiler.facts.roofs import Ceilings
from profiler.grid.cells import Phase
from profiler.judge.breakdown import HostTime
from profiler.predict.interpolation import Line, Surface, line, surface
from profiler.predict.operator_arrays import (
    Array,
    Floats,
    OperatorArrays,
    OperatorColumn,
    StepArrays,
    by_phase,
    octaves,
)

NO_ROOF_S = 1e-9
"""Conversions, and what small kernels lose to their number, have no roof of their own: a time that none falls below."""


@dataclass(frozen=True)
class Replayed:
    """Steps of which kernels were run alone; arrays are [m]."""

    demanded: OperatorArrays
    seconds: Mapping[str, Array]
    """Of one instance of an operator; NaN where it was not replayed."""
    conversion_s: Mapping[str, Array]
    """The part of them that only converts between formats."""

    def at(self, chosen: Array) -> Replayed:
        """The steps that `chosen` (bool or int [n]) picks."""
        return Replayed(
            self.demanded.at(chosen),
            {name: values[chosen] for name, values in self.seconds.items()},
            {name: values[chosen] for name, values in self.conversion_s.items()},
        )


@dataclass(frozen=True)
class MeasuredCells:
    """Cells that have a time, with what was replayed at their shapes; arrays are [m]."""

    replayed: Replayed
    latency_s: Array
    half_width_s: Array
    """Of the 95 % interval."""
    faults: Array
    between: Replayed | None = None
    """Linears at numbers of rows between those of the cells."""

    @property
    def demanded(self) -> OperatorArrays:
        return self.replayed.demanded

    def at(self, chosen: Array) -> MeasuredCells:
        """The cells that `chosen` (bool or int [n]) picks."""
        return MeasuredCells(
            self.replayed.at(chosen),
            self.latency_s[chosen],
            self.half_width_s[chosen],
            self.faults[chosen],
            self.between,
        )

    def __len__(self) -> int:
        return len(self.latency_s)


class KernelTimes(Protocol):
    """What kernels take alone."""

    def small_s(self, steps: StepArrays, traffic_s: Array, from_memory_s: Array) -> Array:
        """Seconds that all small kernels of a step take together.

        `traffic_s` is what their bytes demand of the cache that serves them, `from_memory_s` of the memory: that one
        grows with the tokens alone, and knows no step where a cache ends.
        """

    def seconds(self, column: OperatorColumn, steps: StepArrays, roof_s: Array) -> Array | None:
        """Seconds of one instance at each step, where its roof is `roof_s`; None for one that is not known."""

    def converting_s(self, column: OperatorColumn, steps: StepArrays, roof_s: Array) -> Array:
        """Seconds of one instance that only convert between formats."""


@dataclass(frozen=True)
class Kernels:
    """What the kernels of a model take alone at other shapes, from those at which they were replayed."""

    lines: Mapping[str, Line]
    """By operator: its time over its roof, over rows."""
    surfaces: Mapping[str, Surface]
    """By operator: the log of its time over its roof and its least time, over batch, query and depth (attention)."""
    least_s: Mapping[str, float]
    """The shortest that such an operator was seen to take: its call, or its launch."""
    conversions: Mapping[str, Line]
    small: Line | None = None
    """Of all kernels that are not replayed one by one, over tokens: their time over their traffic from memory or their
    least time; None where they were not run alone."""
    small_in_decode: bool = False
    """Whether they were in a decode step; on a CPU those are next to nothing beside their dispatch."""

    def seconds(self, column: OperatorColumn, steps: StepArrays, roof_s: Array) -> Array | None:
        """Seconds of one instance at each step, where its roof is `roof_s`; None for one that was never replayed."""
        if column.operator in self.surfaces:
            least_s = self.least_s[column.operator]
            ratio = np.exp(self.surfaces[column.operator].level(octaves(steps)))
            return np.asarray(np.maximum(roof_s, ratio * (roof_s + least_s)))
        known = self.lines.get(column.operator)
        return None if known is None else known.seconds(column.rows, roof_s)

    def small_s(self, steps: StepArrays, traffic_s: Array, from_memory_s: Array) -> Array:
        """As they were when they were run alone: so long as their number takes, or as their traffic, which a cache may
        serve."""
        if self.small is None:
            return traffic_s
        alone_s = np.exp(self.small.log_ratio(steps.tokens)) * np.maximum(from_memory_s, self.least_s[REST])
        return np.where(steps.prefill | self.small_in_decode, alone_s, traffic_s)

    def converting_s(self, column: OperatorColumn, steps: StepArrays, roof_s: Array) -> Array:
        """Seconds of one instance that only convert between formats."""
        known = self.conversions.get(column.operator)
        return np.zeros(len(steps)) if known is None else known.seconds(column.rows, np.full(len(steps), NO_ROOF_S))


def replayed_kernels(measured: MeasuredCells, device: DeviceRates) -> Kernels:
    replayed = measured.replayed
    lines, conversions = _lines([part for part in (replayed, measured.between) if part is not None], device)
    surfaces: dict[str, Surface] = {}
    least_s: dict[str, float] = {}
    steps = measured.demanded.steps
    for column in measured.demanded.columns:
        if column.heads is None or (known := _known(replayed.seconds, column)) is None:
            continue
        seconds, roof_s = (
            replayed.seconds[column.operator][known],
            instance_roof_s(column, replayed.demanded, device)[known],
        )
        least_s[column.operator] = float(seconds.min())
        ratio = np.log(seconds / (roof_s + least_s[column.operator]))
        surfaces[column.operator] = surface(octaves(steps.at(known)), ratio, np.full(len(seconds), 0.01))
    small: Line | None = None
    in_decode = False
    rest = replayed.seconds.get(REST)
    if rest is not None and (known := rest > 0).any():
        least_s[REST] = float(rest[known].min())
        traffic_s = from_memory_s(measured.demanded, device, lambda column: column.operator in replayed.seconds)
        demands_s = np.maximum(traffic_s, least_s[REST])
        small = line(steps.tokens[known], rest[known], demands_s[known])
        in_decode = bool((known & ~steps.prefill).any())
    return Kernels(lines, surfaces, least_s, conversions, small, in_decode)


def _lines(parts: Sequence[Replayed], device: DeviceRates) -> tuple[dict[str, Line], dict[str, Line]]:
    """Of every operator over rows, wherever it was replayed: (its time over its roof, what it converts)."""
    found: dict[str, list[tuple[Array, Array, Array]]] = {}
    converting: dict[str, list[tuple[Array, Array, Array]]] = {}
    for part in parts:
        for column in (column for column in part.demanded.columns if column.heads is None):
            roof_s = instance_roof_s(column, part.demanded, device)
            if (known := _known(part.seconds, column)) is not None:
                points = column.rows[known], part.seconds[column.operator][known], roof_s[known]
                found.setdefault(column.operator, []).append(points)
            if (known := _known(part.conversion_s, column)) is not None:
                none_s = np.full(int(known.sum()), NO_ROOF_S)
                points = column.rows[known], part.conversion_s[column.operator][known], none_s
                converting.setdefault(column.operator, []).append(points)
    whole, converted = (
        {name: line(*map(np.concatenate, zip(*points, strict=True))) for name, points in each.items()}
        for each in (found, converting)
    )
    return whole, converted


def _known(seconds: Mapping[str, Array], column: OperatorColumn) -> Array | None:
    """bool[m]: where an operator has a time; None where it has none at all."""
    found = seconds.get(column.operator)
    return None if found is None or not (found > 0).any() else np.asarray(found > 0)


def instance_roof_s(column: OperatorColumn, demanded: OperatorArrays, device: DeviceRates) -> Array:
    """Seconds that one instance of an operator would take at its roof."""
    bandwidth = device.memory_bytes_per_s(demanded.working_set_bytes)
    roof_s = floor_s(column.flops, column.model_bytes, device.ceilings.compute_flops_per_s(column.dtype), bandwidth)
    return np.maximum(np.asarray(roof_s) / column.count, 1e-12)


_READ_AND_WRITTEN = 2


@dataclass(frozen=True)
class DeviceRates:
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

    def between_bytes_per_s(self, demanded: OperatorArrays) -> Array:
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

    def dispatched(self, steps: StepArrays) -> HostTime[Floats]:
        """What the host spends on each step, between the batch sizes at which it was measured."""
        whole, inside, converting = (np.zeros(len(steps)) for _ in range(3))
        for phase, chosen in by_phase(steps):
            known = sorted(self.dispatch.get(phase, {}).items())
            if known:
                batches = np.log2([batch for batch, _ in known])
                at = np.log2(steps.batch[chosen])
                whole[chosen] = np.interp(at, batches, [item.step_s for _, item in known])
                inside[chosen] = np.interp(at, batches, [item.in_kernels_s for _, item in known])
                converting[chosen] = np.interp(at, batches, [item.in_conversions_s for _, item in known])
        return HostTime(whole, inside, converting)


def from_memory_s(demanded: OperatorArrays, device: DeviceRates, replayed: Callable[[OperatorColumn], bool]) -> Array:
    """Seconds that the memory would take for all traffic that no replay has paid for: between the operators, and of
    those that are not `replayed` themselves."""
    parts = [unpaid_from_memory_s(column, device, replayed(column)) for column in demanded.columns]
    return np.asarray(sum(parts, np.zeros(len(demanded.steps))))


def unpaid_from_memory_s(column: OperatorColumn, device: DeviceRates, replayed: bool) -> Array:
    """DRAM time of one operator's traffic that its replay has not paid for."""
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
        total += floor_s(np.asarray(flops), np.asarray(nbytes), flops_per_s, bytes_per_s)
    return total
