"""Forecast the time breakdown of cells that were not measured, from measured ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from profiler.counting.operators import Linear
from profiler.facts.operators import REST
from profiler.grid.cells import CellKey, Phase
from profiler.judge.breakdown import LAST, Demand, StepTerms, idle_share, is_layer, step_terms
from profiler.judge.regimes import LIMITS
from profiler.predict.kernel_times import DeviceRates, Kernels, MeasuredCells, Surface, unpaid_from_memory_s, unpaid_s
from profiler.predict.operator_arrays import Array, Floats, OperatorArrays, OperatorColumn, StepArrays
from profiler.stats import NORMAL_95

# The share of a step from which a term determines its regime.
_BINDS = 0.5


Terms = StepTerms[Floats]
"""The terms of many steps, each [n]."""


@dataclass(frozen=True)
class Forecast:
    """Forecasts of many steps; arrays are [n]."""

    demanded: OperatorArrays
    terms: Terms
    latency_s: Array
    sigma: Array
    """Standard deviation of log(latency)."""


@dataclass(frozen=True)
class FittedModel:
    """A model on a device, fitted to measured cells."""

    device: DeviceRates
    kernels: Kernels
    residuals: Mapping[Phase, Surface] = field(default_factory=dict)
    """By phase: log(measured time / sum of the terms)."""

    def terms(self, demanded: OperatorArrays) -> Terms:
        """The time breakdown of any steps, measured or not."""
        steps, device = demanded.steps, self.device
        bandwidth = device.ceilings.memory_bytes_per_s_for(demanded.working_set_bytes)
        demands: list[Demand[Floats]] = []
        outside_s, unreplayed_s, from_memory_s = (np.zeros(len(steps)) for _ in range(3))
        for column in demanded.columns:
            demand = self._demand(column, steps, bandwidth)
            demands.append(demand)
            replayed = demand.replayed_s is not None
            if not replayed:
                unreplayed_s += demand.ceiling_s(bandwidth)
            outside_s += unpaid_s(column, demand.compute_flops_per_s, bandwidth, device.ceilings.copy_share, replayed)
            from_memory_s += unpaid_from_memory_s(column, device, replayed)
        any_replayed = any(demand.replayed_s is not None for demand in demands)
        beyond_s = self.kernels.small_s(steps, unreplayed_s + outside_s, from_memory_s) - unreplayed_s - outside_s
        zeros = np.zeros(len(steps))
        demands.append(Demand(REST, "other", zeros, zeros, zeros, 1.0, np.maximum(0.0, beyond_s)))
        layers = sum(each.source.count for each in demanded.columns if is_layer(each.source.group, each.operator))
        host = device.launched(steps)
        return step_terms(
            demands,
            bandwidth,
            host if any_replayed else replace(host, in_kernels_s=zeros, in_conversions_s=zeros),
            redundant_s=np.maximum(0.0, outside_s + np.minimum(0.0, beyond_s)),
            padding_s=zeros,
            link_s=device.fetch_s + zeros,
            overlaps=device.overlaps,
            idle_share=steps.prefill * idle_share(layers),
        )

    def _demand(self, column: OperatorColumn, steps: StepArrays, bandwidth: Array) -> Demand[Floats]:
        """An operator's demand in each step, with the time of its kernels if it is known."""
        source = column.source
        demand = Demand(
            name=column.operator,
            # A linear that processes only the last position of each prompt starts after all others, as the LM head.
            group=LAST if isinstance(source, Linear) and source.rows == "last" else source.group,
            flops=column.flops,
            weight_bytes=column.weight_bytes,
            kv_bytes=column.kv_bytes,
            compute_flops_per_s=self.device.ceilings.compute_flops_per_s(source.dtype_name),
        )
        each_ceiling_s = demand.ceiling_s(bandwidth) / source.count
        each_s = self.kernels.seconds(column, steps, each_ceiling_s)
        if each_s is None:
            return demand
        converting_s = np.minimum(each_s, self.kernels.converting_s(column, steps))
        return replace(demand, replayed_s=source.count * each_s, dequantise_s=source.count * converting_s)

    def forecast(self, demanded: OperatorArrays) -> Forecast:
        """Forecast any steps: seconds, and their standard deviation as a share."""
        terms = self.terms(demanded)
        log_ratio, sigma = np.zeros(len(demanded.steps)), np.full(len(demanded.steps), 0.2)
        for phase, chosen in demanded.steps.by_phase:
            if phase in self.residuals:
                log_ratio[chosen], sigma[chosen] = self.residuals[phase].value(demanded.steps.at(chosen).octaves)
        return Forecast(demanded, terms, terms.total_s * np.exp(log_ratio), sigma)


def fit(measured: MeasuredCells, device: DeviceRates) -> FittedModel:
    return fit_residuals(FittedModel(device, Kernels(measured, device)), measured)


def fit_residuals(model: FittedModel, measured: MeasuredCells) -> FittedModel:
    """The model with the residuals of these measured cells instead of its own."""
    steps, terms_s = measured.demanded.steps, model.terms(measured.demanded).total_s
    residuals = {
        phase: Surface(
            steps.at(chosen).octaves,
            values=np.log(measured.latency_s[chosen] / terms_s[chosen]),
            own_noise=measured.half_width_s[chosen] / NORMAL_95 / measured.latency_s[chosen],
        )
        for phase, chosen in steps.by_phase
    }
    return replace(model, residuals=residuals)


def predicted_regimes(terms: Terms) -> list[str]:
    """The regime of each step: that of the terms that take at least half of it, else `mixed`."""
    shares = np.stack([sum(getattr(terms, name) for name in limit.terms) / terms.total_s for limit in LIMITS.values()])
    largest, names = np.argmax(shares, axis=0), list(LIMITS)
    return [names[at] if shares[at, index] >= _BINDS else "mixed" for index, at in enumerate(largest)]


def change_factor(steps: StepArrays, ratios: Sequence[tuple[CellKey, float, float]]) -> tuple[Array, Array] | None:
    """The time of a change over that of the run at each step: (ratio [n], half width of its log [n]).

    `ratios` are measured: (step, ratio, half width). None if the change was not tried in a phase of `steps`.
    """
    factor, half_width = np.ones(len(steps)), np.zeros(len(steps))
    for phase, chosen in steps.by_phase:
        tried = [item for item in ratios if item[0].phase == phase]
        if not tried:
            return None
        keys, measured, half_widths = zip(*tried, strict=True)
        fitted = Surface(
            StepArrays.of(keys).octaves,
            values=np.log(np.array(measured)),
            own_noise=np.array(half_widths) / np.array(measured) / NORMAL_95,
        )
        log_ratio, sigma = fitted.value(steps.at(chosen).octaves)
        factor[chosen], half_width[chosen] = np.exp(log_ratio), NORMAL_95 * sigma
    return factor, half_width
