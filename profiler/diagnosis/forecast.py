"""What cells that nobody measured would take: the split of a step, filled in from the cells that were."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from profiler.diagnosis.columns import Array, Demanded, OperatorColumn, Steps
from profiler.diagnosis.facts import REST
from profiler.diagnosis.step_time import LAYERED, Dispatch, exposed_s, idle_share
from profiler.diagnosis.surface import Line, Surface, line, surface
from profiler.grid import PHASES, Phase
from profiler.roofs.values import Ceilings
from profiler.work.causes import OUTSIDE, Cause

PAGE_BYTES = 4096
MEMORY_SHARE = 0.95
"""Of a device's memory that a step may need at most: the rest is the driver's, the allocator's and fragmentation's."""
NORMAL_95 = 1.96
NO_ROOF_S = 1e-9
"""Conversions, and what small kernels lose to their number, have no roof of their own: a time that none falls below."""
_READ_AND_WRITTEN = 2
# A term that takes half of a step decides it.
_BINDS = 0.5


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
            return self.memory_bytes_per_s(_working_set(demanded))
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


@dataclass(frozen=True)
class Replayed:
    """Steps of which kernels were run alone; arrays are [m]."""

    demanded: Demanded
    seconds: Mapping[str, Array]
    """Of one instance of an operator; NaN where it was not replayed."""
    conversion_s: Mapping[str, Array]
    """The part of them that only converts between formats."""

    def at(self, chosen: Array) -> Replayed:
        """Those that `chosen` picks."""
        return Replayed(
            self.demanded.at(chosen),
            {name: values[chosen] for name, values in self.seconds.items()},
            {name: values[chosen] for name, values in self.conversion_s.items()},
        )


@dataclass(frozen=True)
class Measured:
    """Cells that have a time, with what was replayed at their shapes; arrays are [m]."""

    replayed: Replayed
    latency_s: Array
    half_width_s: Array
    """Of the 95 % interval."""
    faults: Array
    between: Replayed | None = None
    """Linears at numbers of rows between those of the cells."""

    @property
    def demanded(self) -> Demanded:
        return self.replayed.demanded

    def at(self, chosen: Array) -> Measured:
        """Those that `chosen` picks."""
        return Measured(
            self.replayed.at(chosen),
            self.latency_s[chosen],
            self.half_width_s[chosen],
            self.faults[chosen],
            self.between,
        )

    def __len__(self) -> int:
        return len(self.latency_s)


@dataclass(frozen=True)
class Terms:
    """The split of many steps in seconds, each [n], without what it leaves unexplained."""

    weights_s: Array
    kv_s: Array
    compute_s: Array
    dequantise_s: Array
    kernel_s: Array
    avoidable_s: Array
    link_s: Array
    dispatch_s: Array

    @property
    def total_s(self) -> Array:
        return np.asarray(
            self.weights_s
            + self.kv_s
            + self.compute_s
            + self.dequantise_s
            + self.kernel_s
            + self.avoidable_s
            + self.link_s
            + self.dispatch_s
        )

    @property
    def floor_s(self) -> Array:
        """What the work itself demands of the device."""
        return np.asarray(self.weights_s + self.kv_s + self.compute_s + self.link_s)


class KernelTimes(Protocol):
    """What kernels take alone."""

    def small_s(self, steps: Steps, traffic_s: Array, from_memory_s: Array) -> Array:
        """Seconds that all small kernels of a step take together.

        `traffic_s` is what their bytes demand of the cache that serves them, `from_memory_s` of the memory: that one
        grows with the tokens alone, and knows no step where a cache ends.
        """

    def seconds(self, column: OperatorColumn, steps: Steps, roof_s: Array) -> Array | None:
        """Seconds of one instance at each step, where its roof is `roof_s`; None for one that is not known."""

    def converting_s(self, column: OperatorColumn, steps: Steps, roof_s: Array) -> Array:
        """Of these, the seconds that only convert between formats."""


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

    def seconds(self, column: OperatorColumn, steps: Steps, roof_s: Array) -> Array | None:
        """Seconds of one instance at each step, where its roof is `roof_s`; None for one that was never replayed."""
        if column.operator in self.surfaces:
            least_s = self.least_s[column.operator]
            ratio = np.exp(self.surfaces[column.operator].level(octaves(steps)))
            return np.asarray(np.maximum(roof_s, ratio * (roof_s + least_s)))
        known = self.lines.get(column.operator)
        return None if known is None else known.seconds(column.rows, roof_s)

    def small_s(self, steps: Steps, traffic_s: Array, from_memory_s: Array) -> Array:
        """As they were when they were run alone: so long as their number takes, or as their traffic, which a cache may
        serve."""
        if self.small is None:
            return traffic_s
        alone_s = np.exp(self.small.log_ratio(steps.tokens)) * np.maximum(from_memory_s, self.least_s[REST])
        return np.where(steps.prefill | self.small_in_decode, alone_s, traffic_s)

    def converting_s(self, column: OperatorColumn, steps: Steps, roof_s: Array) -> Array:
        """Of these, the seconds that only convert between formats."""
        known = self.conversions.get(column.operator)
        return np.zeros(len(steps)) if known is None else known.seconds(column.rows, np.full(len(steps), NO_ROOF_S))


@dataclass(frozen=True)
class Fitted:
    """A model on a device as far as its measured cells tell of it."""

    device: Device
    kernels: KernelTimes
    faults: Mapping[Phase, tuple[Array, Array]]
    """Octaves of measured steps and the share of the pages they touched that were new."""
    residuals: Mapping[Phase, Surface] = field(default_factory=dict)
    """The log of what was measured over what the split's terms add up to."""

    def terms(self, demanded: Demanded) -> Terms:
        """The split of steps that nobody measured."""
        steps, device = demanded.steps, self.device
        count = len(steps)
        bandwidth, between = device.memory_bytes_per_s(_working_set(demanded)), device.between_bytes_per_s(demanded)
        copies = device.ceilings.copy_share * bandwidth
        weights_s, kv_s, compute_s, dequantise_s, kernel_s = (np.zeros(count) for _ in range(5))
        outside_s, own_s, last_s, from_memory_s = (np.zeros(count) for _ in range(4))
        any_replayed = False
        for column in demanded.columns:
            flops_per_s = device.ceilings.compute_flops_per_s(column.dtype)
            arithmetic_s, traffic_s = column.flops / flops_per_s, column.model_bytes / bandwidth
            by_compute = arithmetic_s >= traffic_s
            compute_s += np.where(by_compute, arithmetic_s, 0.0)
            weights_s += np.where(by_compute, 0.0, column.weight_bytes / bandwidth)
            kv_s += np.where(by_compute, 0.0, column.kv_bytes / bandwidth)
            roof_s = np.maximum(arithmetic_s, traffic_s)
            alone_s = self.kernels.seconds(column, steps, roof_s / column.count)
            if alone_s is None:
                own_s += roof_s
            else:
                any_replayed = True
                converting_s = np.minimum(alone_s, self.kernels.converting_s(column, steps, roof_s / column.count))
                dequantise_s += column.count * converting_s
                kernel_s += column.count * (alone_s - converting_s) - roof_s
            outside_s += _outside_s(column, flops_per_s, copies, between, alone_s is not None)
            from_memory_s += _from_memory_s(column, device, alone_s is not None)
            if column.last_rows:
                last_s += roof_s if alone_s is None else column.count * alone_s
        beyond_s = self.kernels.small_s(steps, own_s + outside_s, from_memory_s) - own_s - outside_s
        faults_s = self._faults(demanded) * device.ceilings.page_fault_s
        kernel_s += np.maximum(0.0, beyond_s - faults_s)
        avoidable_s = np.maximum(0.0, outside_s + np.minimum(0.0, beyond_s)) + faults_s
        host_s, in_kernels_s = device.dispatched(steps)
        if any_replayed:
            kernel_s -= in_kernels_s
        link_s = device.fetch_s + demanded.exchanged_s
        busy_s = weights_s + kv_s + compute_s + dequantise_s + kernel_s + avoidable_s + link_s
        if device.overlaps:
            layers = sum(column.count for column in demanded.columns if column.group in LAYERED)
            host_s = exposed_s(host_s, busy_s, steps.prefill * idle_share(layers), steps.prefill * last_s)
        return Terms(weights_s, kv_s, compute_s, dequantise_s, kernel_s, avoidable_s, link_s, host_s)

    def _faults(self, demanded: Demanded) -> Array:
        """Pages touched for the first time: the share of those written that were new in the nearest measured step."""
        found = np.zeros(len(demanded.steps))
        pages = _written(demanded) / PAGE_BYTES
        for phase, chosen in by_phase(demanded.steps):
            if phase in self.faults:
                points, shares = self.faults[phase]
                at = octaves(demanded.steps.at(chosen))
                distance = sum(np.abs(at[:, axis, None] - points[None, :, axis]) for axis in range(at.shape[1]))
                found[chosen] = shares[np.argmin(np.asarray(distance), axis=1)] * pages[chosen]
        return found

    def forecast(self, demanded: Demanded) -> Forecast:
        """Seconds of each step and by how much they may be off, one standard deviation as a share."""
        terms = self.terms(demanded)
        log_ratio, sigma = np.zeros(len(demanded.steps)), np.full(len(demanded.steps), 0.2)
        for phase, chosen in by_phase(demanded.steps):
            if phase in self.residuals:
                found = self.residuals[phase].value(octaves(demanded.steps.at(chosen)))
                log_ratio[chosen], sigma[chosen] = found
        # What the split left unexplained on one device says nothing of a link between several.
        own_s = terms.total_s - demanded.exchanged_s
        return Forecast(demanded, terms, own_s * np.exp(log_ratio) + demanded.exchanged_s, sigma)


@dataclass(frozen=True)
class Forecast:
    """Many forecast steps; arrays are [n]."""

    demanded: Demanded
    terms: Terms
    latency_s: Array
    sigma: Array

    def fits(self, memory_bytes: int) -> Array:
        """Whether a step finds room: out of memory is a forecast, too."""
        return np.asarray(self.demanded.peak_bytes <= MEMORY_SHARE * memory_bytes)

    @property
    def tokens_per_s(self) -> Array:
        return np.asarray(self.demanded.steps.tokens / self.latency_s)


def fit(measured: Measured, device: Device) -> Fitted:
    """What the measured cells tell of the kernels, of faults, and of what the split leaves unexplained."""
    bare = Fitted(device, _kernels(measured, device), _fault_shares(measured))
    terms_s = bare.terms(measured.demanded).total_s
    residuals: dict[Phase, Surface] = {}
    for phase, chosen in by_phase(measured.demanded.steps):
        values = np.log(measured.latency_s[chosen] / terms_s[chosen])
        own = measured.half_width_s[chosen] / NORMAL_95 / measured.latency_s[chosen]
        residuals[phase] = surface(octaves(measured.demanded.steps.at(chosen)), values, own)
    return replace(bare, residuals=residuals)


def _kernels(measured: Measured, device: Device) -> Kernels:
    replayed = measured.replayed
    lines, conversions = _lines([part for part in (replayed, measured.between) if part is not None], device)
    surfaces: dict[str, Surface] = {}
    least_s: dict[str, float] = {}
    steps = measured.demanded.steps
    for column in measured.demanded.columns:
        if column.heads is None or (known := _known(replayed.seconds, column)) is None:
            continue
        seconds, roof_s = replayed.seconds[column.operator][known], _alone_roof_s(column, replayed, device)[known]
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


def _lines(parts: Sequence[Replayed], device: Device) -> tuple[dict[str, Line], dict[str, Line]]:
    """Of every operator over rows, wherever it was replayed: (its time over its roof, what it converts)."""
    found: dict[str, list[tuple[Array, Array, Array]]] = {}
    converting: dict[str, list[tuple[Array, Array, Array]]] = {}
    for part in parts:
        for column in (column for column in part.demanded.columns if column.heads is None):
            roof_s = _alone_roof_s(column, part, device)
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


def _alone_roof_s(column: OperatorColumn, replayed: Replayed, device: Device) -> Array:
    """Seconds that one instance of an operator would take at its roof."""
    bandwidth = device.memory_bytes_per_s(_working_set(replayed.demanded))
    arithmetic_s = column.flops / device.ceilings.compute_flops_per_s(column.dtype)
    return np.maximum(np.maximum(arithmetic_s, column.model_bytes / bandwidth) / column.count, 1e-12)


def from_memory_s(demanded: Demanded, device: Device, replayed: Callable[[OperatorColumn], bool]) -> Array:
    """Seconds that the memory would take for all traffic that no replay has paid for: between the operators, and of
    those that are not `replayed` themselves."""
    parts = [_from_memory_s(column, device, replayed(column)) for column in demanded.columns]
    return np.asarray(sum(parts, np.zeros(len(demanded.steps))))


def _from_memory_s(column: OperatorColumn, device: Device, replayed: bool) -> Array:
    bandwidth = np.full(len(column.rows), device.ceilings.memory_bytes_per_s)
    own_s = 0.0 if replayed else column.model_bytes / bandwidth
    copies = device.ceilings.copy_share * bandwidth
    return np.asarray(own_s + _outside_s(column, math.inf, copies, bandwidth, replayed))


def _outside_s(column: OperatorColumn, flops_per_s: float, copies: Array, between: Array, replayed: bool) -> Array:
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


def _fault_shares(measured: Measured) -> dict[Phase, tuple[Array, Array]]:
    pages = np.maximum(_written(measured.demanded) / PAGE_BYTES, 1.0)
    steps = measured.demanded.steps
    return {
        phase: (octaves(steps.at(chosen)), measured.faults[chosen] / pages[chosen]) for phase, chosen in by_phase(steps)
    }


def _working_set(demanded: Demanded) -> Array:
    """Bytes that each step must read and write."""
    return np.asarray(sum((column.model_bytes for column in demanded.columns), np.zeros(len(demanded.steps))))


def _written(demanded: Demanded) -> Array:
    """Bytes of operands and intermediates, of which the system may have to find fresh pages for some."""
    total = np.zeros(len(demanded.steps))
    for column in demanded.columns:
        total += column.activation_bytes + sum(column.avoidable_bytes.values(), np.zeros(len(demanded.steps)))
    return total


def by_phase(steps: Steps) -> list[tuple[Phase, Array]]:
    return [(phase, chosen) for phase in PHASES if (chosen := steps.prefill == (phase == "prefill")).any()]


def octaves(steps: Steps) -> Array:
    """(batch, query, depth) of each step, in octaves: [n, 3]."""
    return np.log2(np.stack([steps.batch, steps.query, steps.depth], axis=1).astype(np.float64))


_REGIMES = {
    "memory-bound": ("weights_s", "kv_s"),
    "compute-bound": ("compute_s",),
    "kernel-bound": ("kernel_s", "dequantise_s"),
    "overhead-bound": ("dispatch_s",),
    "link-bound": ("link_s",),
}


def regimes(terms: Terms) -> list[str]:
    """What each step would mostly wait for: the terms that take half of it, else `mixed`."""
    shares = np.stack([sum(getattr(terms, name) for name in names) / terms.total_s for names in _REGIMES.values()])
    largest = np.argmax(shares, axis=0)
    names = list(_REGIMES)
    return [names[at] if shares[at, index] >= _BINDS else "mixed" for index, at in enumerate(largest)]


def tried_factor(
    steps: Steps, ratios: Sequence[tuple[Phase, int, int, int, float, float]]
) -> tuple[Array, Array] | None:
    """What another form makes of each step's time, and how far off that may be (log), from where it was tried.

    `ratios` are (phase, batch, query, depth, ratio, half width); None where a phase was never tried.
    """
    factor, off = np.ones(len(steps)), np.zeros(len(steps))
    for phase, chosen in by_phase(steps):
        known = [item for item in ratios if item[0] == phase]
        if not known:
            return None
        points = np.log2(np.array([item[1:4] for item in known], dtype=np.float64))
        values = np.log(np.array([item[4] for item in known]))
        own = np.array([item[5] / item[4] for item in known]) / NORMAL_95
        log_ratio, sigma = surface(points, values, own).value(octaves(steps.at(chosen)))
        factor[chosen], off[chosen] = np.exp(log_ratio), NORMAL_95 * sigma
    return factor, off
