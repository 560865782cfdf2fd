"""Ranges of step times on any GPU, from the efficiency that published results attained by engine and format."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, get_args

import numpy as np

from profiler.counting.floor import floor_s
from profiler.data.datasheets import Datasheet, gpus
from profiler.data.published_coverage import ENGINE_WORDS
from profiler.data.published_results import EngineKind, PublishedFigure, formats_of, published
from profiler.errors import RequestError
from profiler.facts.operators import OF_CONTEXT
from profiler.grid.cells import Phase
from profiler.predict.operator_arrays import Array, OperatorArrays
from profiler.predict.source_spread import NO_SOURCES
from profiler.quant.registry import FORMATS, published_as

RANGE_SHARE = 0.9
"""Coverage of a range."""
StepKind = Literal["prefill", "one sequence", "several sequences"]
"""The kinds of steps that differ in spread. Decoding one sequence streams weights, and published figures agree closely.
Decoding several also reads caches of lengths that sources seldom state, and prefills may run between the steps."""


@dataclass(frozen=True)
class Shares:
    """The efficiency of an engine with a format, on any GPU."""

    memory: float
    """Share of the datasheet's bandwidth, while it streams weights and cache."""
    compute: float
    """Share of the datasheet's dense peak, in products."""
    layer_s: float = 0.0
    """Seconds of host dispatch per layer, a lower bound on any GPU; 0 for graphs and C++."""
    layer_cycles: float = 0.0
    """GPU clock cycles per layer without streaming, in which kernels start, drain and wait for each other."""

    def compute_bound(self, work: CardSteps) -> Array:
        """bool[n]: whether the arithmetic of the linears takes longer than streaming their weights."""
        return np.asarray(work.flops / (self.compute * work.peak) > work.weight_bytes / (self.memory * work.bandwidth))

    def device_s(self, work: CardSteps) -> Array:
        """Seconds [n] of the device for each step."""
        bytes_per_s = self.memory * work.bandwidth
        linears_s = floor_s(work.flops, work.weight_bytes, self.compute * work.peak, bytes_per_s)
        return np.asarray(linears_s + work.kv_bytes / bytes_per_s + self.layer_cycles * work.layers / work.clock)

    def host_s(self, work: CardSteps) -> Array:
        """Seconds [n] of the host to dispatch each step."""
        return np.asarray(self.layer_s * work.host_index * work.layers)

    def step_s(self, work: CardSteps) -> Array:
        """Seconds [n] of each step: the larger of the device's and the host's."""
        return np.asarray(np.maximum(self.device_s(work), self.host_s(work)))


@dataclass(frozen=True)
class CardSteps:
    """Steps, each with its work and the GPU that executes it; arrays are [n]."""

    flops: Array
    weight_bytes: Array
    kv_bytes: Array
    layers: Array
    peak: Array
    """Dense FLOP/s in the dtype of the products."""
    bandwidth: Array
    """Bytes/s by the datasheet."""
    clock: Array
    """Rated clock in Hz."""
    host_index: Array
    """Dispatch time relative to the typical host of the published figures."""
    batch: Array

    def at(self, chosen: Array) -> CardSteps:
        """The steps that `chosen` (bool or int [n]) picks."""
        return CardSteps(*(getattr(self, item.name)[chosen] for item in fields(self)))

    def floor_s(self) -> Array:
        """Lower bound of each step [n] by the datasheet."""
        return floor_s(self.flops, self.weight_bytes + self.kv_bytes, self.peak, self.bandwidth)


@dataclass(frozen=True)
class Range:
    """90 % ranges of step times in seconds; arrays are [n]."""

    low_s: Array
    typical_s: Array
    high_s: Array
    is_host: Array
    """bool[n]: whether the typical time is the host's dispatch."""


@dataclass(frozen=True)
class Efficiency:
    """The efficiency of an engine kind with a format family, and how far published figures deviate from it."""

    kind: EngineKind
    family: str
    shares: Shares
    spread: dict[StepKind, tuple[float, float]]
    """(low, high) factors of the typical time, by kind of step."""

    def range_s(self, work: CardSteps, phase: Phase) -> Range:
        """The range of each step of a phase, at least the datasheet's lower bound.

        Published decode steps are bound by streaming weights. A decode step of so large a batch that arithmetic binds
        it gets the wider of the ranges of decode and prefill.
        """
        typical, floor = self.shares.step_s(work), work.floor_s()
        low, high = (np.full(len(typical), value) for value in self.spread["prefill"])
        if phase == "decode":
            low, high = (
                np.where(work.batch == 1, one, several)
                for one, several in zip(self.spread["one sequence"], self.spread["several sequences"], strict=True)
            )
            arithmetic = self.shares.compute_bound(work)
            low = np.where(arithmetic, np.minimum(low, self.spread["prefill"][0]), low)
            high = np.where(arithmetic, np.maximum(high, self.spread["prefill"][1]), high)
        at_least = np.maximum(floor, typical)
        is_host = self.shares.host_s(work) > self.shares.device_s(work)
        return Range(np.maximum(floor, low * typical), at_least, high * at_least, is_host)


def family_of(format_: str, batch: int, query: int) -> str:
    """The family of formats with similar kernels. bitsandbytes has different 4-bit kernels for one row and several."""
    if published_as(format_) == "nf4":
        return "nf4, one row" if batch * query == 1 else "nf4, several rows"
    return format_


_WITH_COPIES = 3
"""Bytes moved for a cache that is copied before it is read, in multiples of its size."""


def steps_of(points: Sequence[PublishedFigure]) -> CardSteps:
    """The work of published figures on their GPUs, as their engines execute it.

    In each step, plain transformers read and write the whole cache once more than necessary, since a dynamic cache
    concatenates. `executed` counts a model the same way.
    """
    sheets = {sheet.gpu: sheet for sheet in gpus()}
    return CardSteps(
        np.array([point.flops for point in points]),
        np.array([point.weight_bytes for point in points]),
        np.array([point.kv_bytes * (_WITH_COPIES if point.kind == "eager" else 1) for point in points]),
        np.array([point.layers for point in points], dtype=np.float64),
        np.array([peak_of(sheets[point.gpu], point.format) for point in points]),
        np.array([sheets[point.gpu].bandwidth_bytes_per_s for point in points]),
        np.array([sheets[point.gpu].rated_clock_hz for point in points]),
        np.array([host_index_of(sheets[point.gpu]) for point in points]),
        np.array([point.batch for point in points]),
    )


SMALL_INSTANCE_INDEX = 1.4
"""Dispatch time per layer, relative to larger GPUs, of GPUs that are mostly rented with a few cores of an older server
(`small_host` of gpus.csv).

Eager steps far above their roofs take 1.06 ms per layer for gemma-2b on an A10G and 1.08 ms for Qwen2.5-3B on a T4,
compared with 0.66 to 0.78 ms on the hosts of an RTX 4090 and an A100 (published.csv)."""


def host_index_of(sheet: Datasheet) -> float:
    """Dispatch time of the host with which a GPU is mostly rented, relative to the hosts of larger GPUs."""
    return SMALL_INSTANCE_INDEX if sheet.small_host else 1.0


def peak_of(sheet: Datasheet, format_: str, dtype: str = "float16") -> float:
    """The dense peak in FLOP/s of products in a format, in a model of `dtype`.

    It is that of 16 bits if the GPU has no units for the format. For float32 it excludes TF32, which torch does not use
    for products by default. Raises RequestError if the datasheet has no such peak.
    """
    if format_ == "fp8" and sheet.peak_fp8_flops_per_s:
        return sheet.peak_fp8_flops_per_s
    peak = sheet.peak_fp32_flops_per_s if dtype == "float32" else sheet.peak_fp16_flops_per_s
    if peak is None:
        raise RequestError(
            f"{sheet.gpu}: the datasheet has no peak for products in {dtype}; use --dtype bfloat16 or another GPU."
        )
    return peak


_GRIDS = {
    "memory": np.geomspace(0.2, 1.0, 14),
    "compute": np.geomspace(0.2, 1.0, 28),
    "layer_s": np.geomspace(1e-4, 4e-3, 20),
    "layer_cycles": np.geomspace(3e4, 6e5, 16),
}
_FINER = np.geomspace(0.87, 1.15, 13)
"""Factors of a grid's best value for a second, finer grid; they span more than a step of the first."""
_PULL = 0.6
"""Weight of the prior: a share that is off by a factor of e costs as much as one GPU's points off by e**0.6."""
_PRIOR = {
    "eager": Shares(0.75, 0.60, layer_s=7e-4),
    "compiled": Shares(0.75, 0.60, layer_cycles=1e5),
    "llama.cpp": Shares(0.75, 0.60, layer_cycles=1e5),
}
"""The shares assumed without any point: what healthy GPUs reach in copies and large products (gpus.csv).

Eager engines launch about 40 kernels per layer from Python, at 10 to 20 us each. Graphs and C++ launch about ten
kernels per layer, which take 5 us each to start and drain at 2 GHz. An engine is limited by one of the two, so the
other is 0."""


def fit_efficiency(points: Sequence[PublishedFigure], near: Shares) -> Shares:
    """The shares that fit published points best, starting from the prior `near`.

    They minimise the sum of |log(published / predicted)|, in which every GPU has the same weight, plus a penalty for
    the distance to `near`. The search is on a grid, then on a finer one around its best. Streaming and layer overhead
    are fitted together, since only the size of a model separates them.
    """
    work, log_s = steps_of(points), np.log([point.latency_s for point in points])
    points_per_gpu = Counter(point.gpu for point in points)
    weight = np.array([1 / points_per_gpu[point.gpu] for point in points])
    streaming = ("memory", "layer_s" if near.layer_s else "layer_cycles")

    def best_of(values: dict[str, Array], shares: Shares) -> Shares:
        axes = np.meshgrid(*values.values(), indexing="ij")
        candidates: dict[str, Any] = {name: axis.reshape(-1, 1) for name, axis in zip(values, axes, strict=True)}
        error = (weight * np.abs(log_s - np.log(replace(shares, **candidates).step_s(work)))).sum(axis=1)
        penalty = sum(_PULL * np.log(column[:, 0] / getattr(near, name)) ** 2 for name, column in candidates.items())
        best_index = np.argmin(error + penalty)
        return replace(shares, **{name: float(column[best_index, 0]) for name, column in candidates.items()})

    best = near
    for names in (streaming, ("compute",)):
        best = best_of({name: np.append(_GRIDS[name], getattr(best, name)) for name in names}, best)
    finer = {name: getattr(best, name) * _FINER for name in streaming}
    return best_of({**finer, "memory": np.minimum(finer["memory"], 1.0)}, best)


def dense_shares(points: Sequence[PublishedFigure], kind: EngineKind) -> Shares:
    """The shares of an engine kind with dense weights, for which there are most figures."""
    dense = [point for point in points if point.kind == kind and _family(point) == "dense"]
    return fit_efficiency(dense, _PRIOR[kind]) if dense else _PRIOR[kind]


def shares_of(points: Sequence[PublishedFigure], kind: EngineKind, family: str, dense: Shares) -> Shares:
    """The shares of an engine kind with a format family, with the `dense` shares as the prior."""
    family_points = [point for point in points if point.kind == kind and _family(point) == family]
    return fit_efficiency(family_points, dense) if family_points and family != "dense" else dense


def _family(point: PublishedFigure) -> str:
    return family_of(point.format, point.batch, point.query_tokens)


def residuals(points: Sequence[PublishedFigure], shares: Shares) -> Array:
    """log(published / typical time) [n] of each point."""
    return np.asarray(np.log([point.latency_s for point in points]) - np.log(shares.step_s(steps_of(points))))


@dataclass(frozen=True)
class Stray:
    """A published figure's deviation from a fit to the figures of other publishers."""

    point: PublishedFigure
    log_ratio: float
    """log(published / typical time)."""


def strays(points: Sequence[PublishedFigure], kind: EngineKind) -> list[Stray]:
    """The deviation of every point of an engine kind from a fit that left out its publisher."""
    deviations: list[Stray] = []
    kind_points = [point for point in points if point.kind == kind]
    for publisher in sorted({point.publisher for point in kind_points}):
        left_out = [point for point in kind_points if point.publisher == publisher]
        others = [point for point in kind_points if point.publisher != publisher]
        dense = dense_shares(others, kind)
        for family in sorted({_family(point) for point in left_out}):
            chosen = [point for point in left_out if _family(point) == family]
            log_ratios = residuals(chosen, shares_of(others, kind, family, dense)).tolist()
            deviations += [Stray(*pair) for pair in zip(chosen, log_ratios, strict=True)]
    return deviations


def attained_by(
    points: Sequence[PublishedFigure], kind: EngineKind, family: str, left_out: Sequence[Stray]
) -> Efficiency:
    """The efficiency of an engine kind with a format family, from `points` and their deviations `left_out`."""
    step_kinds: tuple[StepKind, ...] = get_args(StepKind)
    return Efficiency(
        kind,
        family,
        shares_of(points, kind, family, dense_shares(points, kind)),
        {step_kind: _spread(left_out, family, step_kind) for step_kind in step_kinds},
    )


def _step_kind(point: PublishedFigure) -> StepKind:
    if point.phase == "prefill":
        return "prefill"
    return "one sequence" if point.batch == 1 else "several sequences"


def _spread(engine: Sequence[Stray], family: str, kind: StepKind) -> tuple[float, float]:
    """Factors (low, high) of the typical time that cover nine in ten figures of publishers not seen.

    The spread of the engine's phase is narrowed to the family, then to the kind of step.
    """
    phase: Phase = "prefill" if kind == "prefill" else "decode"
    of_phase = [stray for stray in engine if stray.point.phase == phase]
    of_family = [stray for stray in of_phase if _family(stray.point) == family]
    of_kind = [stray for stray in of_family if _step_kind(stray.point) == kind]
    spread = NO_SOURCES
    for group in (of_phase, of_family, of_kind):
        spread = spread.narrowed((stray.point.publisher, stray.log_ratio) for stray in group)
    low, high = spread.interval(RANGE_SHARE)
    return math.exp(min(low, 0.0)), math.exp(max(high, 0.0))


@cache
def attained(kind: EngineKind, family: str) -> Efficiency:
    """The efficiency of an engine kind with a format family, from all published points."""
    return attained_by(published(), kind, family, _strays(kind))


def step_ranges(
    kind: EngineKind, format_: str, work: CardSteps, query: Array, phases: Sequence[Phase], exchanged_s: Array
) -> Range:
    """The range of each of n steps in an engine kind and a format, with `exchanged_s` [n] of collectives.

    `query` [n] are the new tokens of each sequence; `work` may have further steps.
    """
    count = len(phases)
    families = [family_of(format_, int(work.batch[at]), int(query[at])) for at in range(count)]
    kinds = list(zip(families, phases, strict=True))
    whole = Range(np.zeros(count), np.zeros(count), np.zeros(count), np.zeros(count, dtype=bool))
    for family, phase in set(kinds):
        chosen = np.array([each == (family, phase) for each in kinds]).nonzero()[0]
        part = attained(kind, family).range_s(work.at(chosen), phase)
        for name in ("low_s", "typical_s", "high_s"):
            getattr(whole, name)[chosen] = getattr(part, name) + exchanged_s[chosen]
        whole.is_host[chosen] = part.is_host
    return whole


@cache
def _strays(kind: EngineKind) -> list[Stray]:
    return strays(published(), kind)


@dataclass(frozen=True)
class WorkAt:
    """The work of many steps as an engine executes them; arrays are [n]."""

    flops: Array
    weight_bytes: Array
    kv_bytes: Array
    """Bytes of the cache that are read and written, including the copies of plain transformers."""


def executed(needed: OperatorArrays, engine: EngineKind) -> WorkAt:
    """The algorithm's work, plus the avoidable work of plain transformers (`eager`) that grows with the context.

    The latter are copies of the cache, repeated expansion of a latent, and materialised heads and scores. Other
    avoidable work (operands between kernels, dequantisation) is part of the fitted efficiency.
    """
    zeros = np.zeros(len(needed.steps))
    causes = OF_CONTEXT if engine == "eager" else frozenset()
    flops, weight_bytes, kv_bytes = zeros.copy(), zeros.copy(), zeros.copy()
    for column in needed.columns:
        flops += column.flops + sum((column.avoidable_flops.get(cause, 0.0) for cause in causes), zeros)
        weight_bytes += column.weight_bytes
        kv_bytes += column.kv_bytes + sum((column.avoidable_bytes.get(cause, 0.0) for cause in causes), zeros)
    return WorkAt(flops, weight_bytes, kv_bytes)


NO_MIXTURE = "No published figure of a mixture of experts is in these ranges, so their coverage of one is unknown."


def basis_for(format_: str, engine: EngineKind) -> EngineKind | None:
    """`engine` if it has published figures of a format; else None, since other engines have other kernels."""
    return engine if format_ in formats_of(engine) else None


def no_basis(quant: str, engine: EngineKind) -> str:
    """Why a format of `--quant` has no range in an engine kind, and what has one, as the end of a sentence."""
    kinds: tuple[EngineKind, ...] = ("eager", "compiled")
    instead = [f"--engine {kind}" for kind in kinds if kind != engine and basis_for(published_as(quant), kind)]
    instead.append("--quant " + ", ".join(name for name in FORMATS if basis_for(published_as(name), engine)))
    return (
        f"no basis: no figure of {quant} in {ENGINE_WORDS[engine]} is published, and other engines have other kernels;"
        f" use {' or '.join(instead)}."
    )


def card_steps(
    sheet: Datasheet, work: WorkAt, batch: Array, *, peak: float, layers: int, host_index: float
) -> CardSteps:
    """Steps of `work` on one GPU; `peak` is in FLOP/s (`peak_of`), `batch` is [n]."""

    def each(value: float) -> Array:
        return np.full(len(batch), float(value))

    return CardSteps(
        flops=work.flops,
        weight_bytes=work.weight_bytes,
        kv_bytes=work.kv_bytes,
        layers=each(layers),
        peak=each(peak),
        bandwidth=each(sheet.bandwidth_bytes_per_s),
        clock=each(sheet.rated_clock_hz),
        host_index=each(host_index),
        batch=batch,
    )
