"""Forecast cells that were not measured: the time breakdown, filled in from measured cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from profiler.facts.operators import REST
from profiler.grid.cells import Phase
from profiler.judge.breakdown import LAST, LAYERED, Demand, StepTerms, idle_share, step_terms
from profiler.predict.interpolation import Surface, surface
from profiler.predict.kernel_times import (
    DeviceRates,
    KernelTimes,
    MeasuredCells,
    replayed_kernels,
    unpaid_from_memory_s,
    unpaid_s,
)
from profiler.predict.operator_arrays import (
    Array,
    Floats,
    OperatorArrays,
    OperatorColumn,
    StepArrays,
    by_phase,
    octaves,
)

PAGE_BYTES = 4096
USABLE_MEMORY_SHARE = 0.95
"""Of a device's memory that a step may need at most: the rest is the driver's, the allocator's and fragmentation's."""
NORMAL_95 = 1.96
# A term that takes half of a step decides it.
_BINDS = 0.5


Terms = StepTerms[Floats]
"""The terms of many steps, each [n]."""


@dataclass(frozen=True)
class Fitted:
    """A model on a device as far as its measured cells tell of it."""

    device: DeviceRates
    kernels: KernelTimes
    faults: Mapping[Phase, tuple[Array, Array]]
    """Octaves of measured steps and the share of the pages they touched that were new."""
    residuals: Mapping[Phase, Surface] = field(default_factory=dict)
    """The log of what was measured over what the split's terms add up to."""

    def terms(self, demanded: OperatorArrays) -> Terms:
        """The split of steps that nobody measured."""
        steps, device = demanded.steps, self.device
        bandwidth, between = device.memory_bytes_per_s(demanded.working_set_bytes), device.between_bytes_per_s(demanded)
        copies = device.ceilings.copy_share * bandwidth
        demands: list[Demand[Floats]] = []
        outside_s, own_s, from_memory_s = (np.zeros(len(steps)) for _ in range(3))
        for column in demanded.columns:
            demand = self._demand(column, steps, bandwidth)
            demands.append(demand)
            replayed = demand.replayed_s is not None
            if not replayed:
                own_s += demand.roof_s(bandwidth)
            outside_s += unpaid_s(column, demand.compute_flops_per_s, copies, between, replayed)
            from_memory_s += unpaid_from_memory_s(column, device, replayed)
        any_replayed = any(demand.replayed_s is not None for demand in demands)
        beyond_s = self.kernels.small_s(steps, own_s + outside_s, from_memory_s) - own_s - outside_s
        faults_s = self._faults(demanded) * device.ceilings.page_fault_s
        none = np.zeros(len(steps))
        demands.append(Demand(REST, "other", none, none, none, 1.0, np.maximum(0.0, beyond_s - faults_s)))
        layers = sum(column.count for column in demanded.columns if column.group in LAYERED)
        host = device.dispatched(steps)
        return step_terms(
            demands,
            bandwidth,
            host if any_replayed else replace(host, in_kernels_s=none, in_conversions_s=none),
            avoidable_s=np.maximum(0.0, outside_s + np.minimum(0.0, beyond_s)) + faults_s,
            padding_s=none,
            link_s=device.fetch_s + demanded.exchanged_s,
            overlaps=device.overlaps,
            idle_share=steps.prefill * idle_share(layers),
        )

    def _demand(self, column: OperatorColumn, steps: StepArrays, bandwidth: Array) -> Demand[Floats]:
        """An operator's demand in each step, with the time of its kernels where that is known."""
        demand = Demand(
            name=column.operator,
            group=LAST if column.last_rows else column.group,
            flops=column.flops,
            weight_bytes=column.weight_bytes,
            kv_bytes=column.kv_bytes,
            compute_flops_per_s=self.device.ceilings.compute_flops_per_s(column.dtype),
        )
        each_roof_s = demand.roof_s(bandwidth) / column.count
        each_s = self.kernels.seconds(column, steps, each_roof_s)
        if each_s is None:
            return demand
        converting_s = np.minimum(each_s, self.kernels.converting_s(column, steps, each_roof_s))
        return replace(demand, replayed_s=column.count * each_s, dequantise_s=column.count * converting_s)

    def _faults(self, demanded: OperatorArrays) -> Array:
        """Pages touched for the first time: the share of those written that were new in the nearest measured step."""
        found = np.zeros(len(demanded.steps))
        pages = demanded.written_bytes / PAGE_BYTES
        for phase, chosen in by_phase(demanded.steps):
            if phase in self.faults:
                points, shares = self.faults[phase]
                at = octaves(demanded.steps.at(chosen))
                distance = sum(np.abs(at[:, axis, None] - points[None, :, axis]) for axis in range(at.shape[1]))
                found[chosen] = shares[np.argmin(np.asarray(distance), axis=1)] * pages[chosen]
        return found

    def forecast(self, demanded: OperatorArrays) -> Forecast:
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

    demanded: OperatorArrays
    terms: Terms
    latency_s: Array
    sigma: Array

    def fits(self, memory_bytes: int) -> Array:
        """Whether a step finds room: out of memory is a forecast, too."""
        return np.asarray(self.demanded.peak_bytes <= USABLE_MEMORY_SHARE * memory_bytes)

    @property
    def tokens_per_s(self) -> Array:
        return np.asarray(self.demanded.steps.tokens / self.latency_s)


def fit(measured: MeasuredCells, device: DeviceRates) -> Fitted:
    """What the measured cells tell of the kernels, of faults, and of what the split leaves unexplained."""
    bare = Fitted(device, replayed_kernels(measured, device), _fault_shares(measured))
    terms_s = bare.terms(measured.demanded).total_s
    residuals: dict[Phase, Surface] = {}
    for phase, chosen in by_phase(measured.demanded.steps):
        values = np.log(measured.latency_s[chosen] / terms_s[chosen])
        own = measured.half_width_s[chosen] / NORMAL_95 / measured.latency_s[chosen]
        residuals[phase] = surface(octaves(measured.demanded.steps.at(chosen)), values, own)
    return replace(bare, residuals=residuals)


def _fault_shares(measured: MeasuredCells) -> dict[Phase, tuple[Array, Array]]:
    pages = np.maximum(measured.demanded.written_bytes / PAGE_BYTES, 1.0)
    steps = measured.demanded.steps
    return {
        phase: (octaves(steps.at(chosen)), measured.faults[chosen] / pages[chosen]) for phase, chosen in by_phase(steps)
    }


_REGIMES = {
    "memory-bound": ("weights_s", "kv_s"),
    "compute-bound": ("compute_s",),
    "kernel-bound": ("kernel_s", "dequantise_s"),
    "overhead-bound": ("dispatch_s",),
    "link-bound": ("link_s",),
}


def predicted_regimes(terms: Terms) -> list[str]:
    """What each step would mostly wait for: the terms that take half of it, else `mixed`."""
    shares = np.stack([sum(getattr(terms, name) for name in names) / terms.total_s for names in _REGIMES.values()])
    largest = np.argmax(shares, axis=0)
    names = list(_REGIMES)
    return [names[at] if shares[at, index] >= _BINDS else "mixed" for index, at in enumerate(largest)]


def variant_factor(
    steps: StepArrays, ratios: Sequence[tuple[Phase, int, int, int, float, float]]
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
