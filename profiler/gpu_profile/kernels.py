"""Kernel and step times of any model, derived from a profile's products, attention, dispatch and roofs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from profiler.counting.attention import AttentionCore
from profiler.counting.floor import floor_s
from profiler.counting.operators import Linear
from profiler.facts.dispatch import Dispatch
from profiler.facts.roofs import Ceilings
from profiler.gpu_profile.profile import AttentionPoint, GpuProfile, ProductPoint
from profiler.grid.cells import PHASES, Phase
from profiler.predict.cross_validation import HeldOut
from profiler.predict.kernel_times import (
    DeviceRates,
    KernelSurface,
    KernelTimes,
    Line,
    Surface,
    kernel_surface,
    line,
    surface,
)
from profiler.predict.operator_arrays import Array, OperatorColumn, StepArrays
from profiler.predict.predict import FittedModel

_SAMPLING = 0.02
"""Standard deviation of the median of a few dozen calls, as a share."""
_NS = 1e9
_OCTAVES_OF_WIDTH = 0.5
"""Distance of a doubling of a width: it changes a kernel's share of its roof half as much as a doubling of rows."""


@dataclass(frozen=True)
class Products:
    """Times of matrix products: log(time / roof) over widths, one surface per measured number of rows.

    A library may use different kernels for one row and for two. MKL's float32 kernels lost 30 ms of a decode step of
    SmolLM2-135M at one row, 63 ms at two and 48 ms at four. So nothing is smoothed over rows; between two measured
    numbers of rows the ratio is interpolated linearly.
    """

    by_rows: Mapping[int, Surface]
    measured: Mapping[tuple[int, int, int], float]
    """Measured log ratios by (rows, in features, out features). They take precedence over the surface, which smooths
    away the special kernels that a library has for some widths."""

    def log_ratio(self, rows: Array, in_features: int, out_features: int) -> Array:
        """log(time / roof) [n] at `rows` [n]; constant beyond the measured rows."""
        widths = _widths(in_features, out_features)
        measured_rows = sorted(self.by_rows)
        ratios = [
            self.measured.get((count, in_features, out_features), float(self.by_rows[count].level(widths)[0]))
            for count in measured_rows
        ]
        return np.asarray(np.interp(np.log2(np.maximum(rows, 1)), np.log2(measured_rows), ratios))

    def sigma(self, rows: int, in_features: int, out_features: int) -> float:
        """Standard deviation of the log ratio, at a measured number of rows."""
        return float(self.by_rows[rows].value(_widths(in_features, out_features))[1][0])


@dataclass(frozen=True)
class ProfileKernels(KernelTimes):
    """Kernel times of a model on a profiled GPU."""

    ceilings: Ceilings
    products: Mapping[tuple[str, str], Products]
    """By (dtype, format)."""
    attentions: Mapping[str, KernelSurface]
    """By dtype, over (batch, queries, keys, width of all query heads)."""
    layers: int
    """Layers of the model that is forecast."""
    least_small_s: float = 0.0
    """Lower bound in seconds of a step's small kernels, from their number; 0 on a CPU, where dispatch includes it."""
    small: Line | None = None
    """One layer's small kernels in a prefill: time / traffic time over traffic in ns; None if not profiled."""

    def small_s(self, steps: StepArrays, traffic_s: Array, from_memory_s: Array) -> Array:
        """Seconds of all small kernels per step: by the profile in a prefill, else traffic or the lower bound."""
        if self.small is None:
            return np.maximum(self.least_small_s, traffic_s)
        alone_s = np.exp(self.small.log_ratio(_NS * from_memory_s / self.layers)) * from_memory_s
        return np.where(steps.prefill, alone_s, traffic_s)

    def seconds(self, column: OperatorColumn, steps: StepArrays, roof_s: Array) -> Array | None:
        """Seconds of one instance at each step [n]; None for an operator that was not profiled.

        The profile's operands came from memory. A cache that holds a model's operands saves the traffic, but not the
        kernels' other losses: a 4-bit kernel unpacks no faster. So the profiled loss is added to `roof_s`.
        """
        memory_s = column.model_bytes / self.ceilings.memory_bytes_per_s
        from_memory_s = np.maximum(column.flops / self.ceilings.compute_flops_per_s(column.dtype), memory_s)
        from_memory_s = from_memory_s / column.count
        source = column.source
        if isinstance(source, AttentionCore):
            attention = self.attentions.get(column.dtype)
            if attention is None:
                return None
            width = np.full(len(steps), source.query_heads * source.qk_dim)
            profiled_s = attention.seconds(_log_sizes(steps.batch, steps.query, steps.depth, width), from_memory_s)
        else:
            if not isinstance(source, Linear):
                return None
            weight = source.weight
            format_ = "transposed" if weight.transposed else weight.format
            products = self.products.get((column.dtype, format_)) or self.products.get((column.dtype, "dense"))
            if products is None:
                return None
            log_ratio = products.log_ratio(column.rows, weight.in_features, weight.out_features)
            profiled_s = np.exp(log_ratio) * from_memory_s
        return np.asarray(roof_s + np.maximum(0.0, profiled_s - from_memory_s))


def kernels_of(profile: GpuProfile, dtype: str, layers: int) -> ProfileKernels:
    """Kernel times by all points of a profile, for a model of `dtype` with `layers` layers."""
    ceilings = profile.ceilings
    products = {
        key: _products([point for point in profile.products if (point.dtype, point.format) == key], ceilings)
        for key in dict.fromkeys((point.dtype, point.format) for point in profile.products)
    }
    attentions = {
        kind: _attention([point for point in profile.attentions if point.dtype == kind], ceilings)
        for kind in dict.fromkeys(point.dtype for point in profile.attentions)
    }
    least_s = layers * _SMALL_KERNELS * ceilings.launch.get("device_s", 0.0)
    smalls = [point for point in profile.smalls if point.dtype == dtype]
    traffic_s, seconds = (np.array([getattr(point, name) for point in smalls]) for name in ("traffic_s", "seconds"))
    small = line(_NS * traffic_s, seconds, traffic_s) if smalls else None
    return ProfileKernels(ceilings, products, attentions, layers, least_s, small)


def _products(points: Sequence[ProductPoint], ceilings: Ceilings) -> Products:
    log_ratios = {point: math.log(point.seconds / _product_roof_s(point, ceilings)) for point in points}
    by_rows: dict[int, list[ProductPoint]] = {}
    for point in points:
        by_rows.setdefault(point.rows, []).append(point)
    surfaces = {
        rows: surface(
            np.concatenate([_widths(point.in_features, point.out_features) for point in row_points]),
            np.array([log_ratios[point] for point in row_points]),
            np.full(len(row_points), _SAMPLING),
        )
        for rows, row_points in by_rows.items()
    }
    measured = {(point.rows, point.in_features, point.out_features): ratio for point, ratio in log_ratios.items()}
    return Products(surfaces, measured)


def _product_roof_s(point: ProductPoint, ceilings: Ceilings) -> float:
    flops = 2.0 * point.rows * point.in_features * point.out_features
    return floor_s(flops, point.weight_bytes, ceilings.compute_flops_per_s(point.dtype), ceilings.memory_bytes_per_s)


def _attention(points: Sequence[AttentionPoint], ceilings: Ceilings) -> KernelSurface:
    shapes = [(point.batch, point.query, point.keys, point.query_heads * point.head_dim) for point in points]
    seconds = np.array([point.seconds for point in points])
    roof_s = np.array([_attention_roof_s(point, ceilings) for point in points])
    return kernel_surface(_log_sizes(*np.array(shapes).T), seconds, roof_s, _SAMPLING)


def _attention_roof_s(point: AttentionPoint, ceilings: Ceilings) -> float:
    """The roof of an attention core: FLOPs of the exact causal triangle; the cache is read, new tokens written once."""
    past = point.keys - point.query
    pairs = point.batch * (point.query * past + point.query * (point.query + 1) // 2)
    flops = 4.0 * point.query_heads * point.head_dim * pairs
    itemsize = 4 if point.dtype == "float32" else 2
    nbytes = point.batch * point.keys * 2 * point.kv_heads * point.head_dim * itemsize
    return floor_s(flops, nbytes, ceilings.compute_flops_per_s(point.dtype), ceilings.memory_bytes_per_s)


def _widths(in_features: int, out_features: int) -> Array:
    """The point [1, 2] of a weight on a surface over widths."""
    return np.asarray(_OCTAVES_OF_WIDTH * np.log2([[float(in_features), float(out_features)]]))


def _log_sizes(*columns: Array) -> Array:
    """Columns [n] in octaves: [n, columns]."""
    return np.log2(np.stack(columns, axis=1).astype(np.float64))


def fitted_on(profile: GpuProfile, dtype: str, layers: int) -> FittedModel:
    """A fit of a model with `layers` layers on a profiled GPU, without any measurement of the model itself."""
    dispatch: dict[Phase, dict[int, Dispatch]] = {phase: {} for phase in PHASES}
    profiled_dtype = dtype if any(point.dtype == dtype for point in profile.dispatches) else "float32"
    for point in profile.dispatches:
        if point.dtype == profiled_dtype:
            step = Dispatch(layers * point.layer_s, layers * point.in_kernels_s)
            dispatch[point.phase][point.batch_size] = step
    device = DeviceRates(profile.ceilings, dispatch, profile.overlaps, profile.room_bytes)
    return FittedModel(device, kernels_of(profile, dtype, layers), {})


_SMALL_KERNELS = 32
"""Kernels per layer of a dense model besides its seven products and its attention.

transformers 5.23 runs about 40 per layer (counted on fake tensors: 9 multiplications, 6 additions, 4 concatenations, 4
casts, 2 each of pow, mean, rsqrt, neg, copies). Each takes at least as long as a tiny kernel in a replayed graph."""


def held_out_kernels(profile: GpuProfile, dtype: str) -> HeldOut:
    """The errors of the profile's dense products, each weight shape forecast from the other shapes."""
    points = [point for point in profile.products if point.dtype == dtype and point.format == "dense"]
    errors: list[float] = []
    widths: list[float] = []
    forecasts_s: list[float] = []
    for shape in dict.fromkeys((point.in_features, point.out_features) for point in points):
        inside = [point for point in points if (point.in_features, point.out_features) == shape]
        others = [point for point in points if point not in inside]
        if len(others) < 3:
            continue
        products = _products(others, profile.ceilings)
        for point in inside:
            if point.rows not in products.by_rows:
                continue
            ratio = float(np.exp(products.log_ratio(np.array([point.rows]), *shape)[0]))
            seconds = max(1.0, ratio) * _product_roof_s(point, profile.ceilings)
            forecasts_s.append(seconds)
            errors.append(abs(seconds / point.seconds - 1))
            widths.append(abs(float(np.log(seconds / point.seconds))) / products.sigma(point.rows, *shape))
    return HeldOut(np.array(errors), np.array(widths), np.arange(len(errors)), np.array(forecasts_s))
