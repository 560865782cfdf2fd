"""Ranges of efficiency that published results attained, by GPU, engine and format."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

import numpy as np

from profiler.data.datasheets import Datasheet, gpus
from profiler.data.published_results import EngineKind, Published, published
from profiler.errors import RequestError
from profiler.facts.operators import OF_CONTEXT
from profiler.grid.cells import Phase
from profiler.predict.operator_arrays import Array, OperatorArrays
from profiler.quant.registry import published_as

RANGE_SHARE = 0.9
"""A range is to hold nine in ten."""
StepKind = Literal["prefill", "one sequence", "several sequences"]
"""Of a step. Decoding one sequence streams weights, and figures of it lie close together; several also read caches, of
lengths that sources seldom state, beside prompts that are read between steps."""


@dataclass(frozen=True)
class Shares:
    """What an engine attains with a format, wherever it runs."""

    memory: float
    """Of the datasheet's bandwidth, while it streams weights and cache."""
    compute: float
    """Of its dense peak, while it multiplies."""
    layer_s: float = 0.0
    """Seconds that the host needs to dispatch a layer, where it dispatches: below that no card makes a step faster."""
    layer_cycles: float = 0.0
    """Cycles of the card in each layer in which nothing streams: its kernels start, drain and wait for each other."""

    def compute_bound(self, work: CardSteps) -> Array:
        """Whether the arithmetic of its linears takes longer than streaming them."""
        return np.asarray(work.flops / (self.compute * work.peak) > work.weight_bytes / (self.memory * work.bandwidth))

    def step_s(self, work: CardSteps) -> Array:
        """Seconds of each step: the device's, or the host's where that is longer."""
        linears_s = np.maximum(
            work.flops / (self.compute * work.peak), work.weight_bytes / (self.memory * work.bandwidth)
        )
        device_s = (
            linears_s + work.kv_bytes / (self.memory * work.bandwidth) + self.layer_cycles * work.layers / work.clock
        )
        return np.asarray(np.maximum(device_s, self.layer_s * work.host_index * work.layers))


@dataclass(frozen=True)
class CardSteps:
    """Steps on cards; arrays of one length."""

    flops: Array
    weight_bytes: Array
    kv_bytes: Array
    layers: Array
    peak: Array
    """FLOP/s of the dtype that it multiplies in, dense."""
    bandwidth: Array
    clock: Array
    """Hz, as rated."""
    host_index: Array
    """How many times as long as the typical host of the published figures dispatch takes."""
    batch: Array

    def floor_s(self) -> Array:
        """The datasheet's own floor."""
        return np.asarray(np.maximum(self.flops / self.peak, (self.weight_bytes + self.kv_bytes) / self.bandwidth))


@dataclass(frozen=True)
class Range:
    """Seconds between which nine in ten published figures of this kind lie; arrays of one length."""

    low_s: Array
    typical_s: Array
    high_s: Array


@dataclass(frozen=True)
class Attained:
    """Shares of one engine kind and format family, and how far published figures stray from them."""

    kind: EngineKind
    family: str
    shares: Shares
    spread: dict[StepKind, tuple[float, float]]
    """(low, high) factors around the typical time, by kind of step."""
    points: int
    cards: int
    models: int

    def range_s(self, work: CardSteps, phase: Phase) -> Range:
        """The range of each step; never below the datasheet's floor.

        Published decodes stream their weights. One whose batch is so large that arithmetic binds it strays as prefills
        do as well.
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
        return Range(np.maximum(floor, low * typical), np.maximum(floor, typical), high * np.maximum(floor, typical))


def family_of(format_: str, batch: int, query: int) -> str:
    """Formats whose kernels behave alike. bitsandbytes' 4-bit kernel of one row is another than that of several."""
    if published_as(format_) == "nf4":
        return "nf4, one row" if batch * query == 1 else "nf4, several rows"
    return format_


_WITH_COPIES = 3
"""Bytes moved of a cache that is copied (read and written) before it is read, as a multiple of it."""


def steps_of(points: Sequence[Published]) -> CardSteps:
    """The work of published figures on their cards, as their engines execute it.

    Plain transformers read and write each cached token once more than they need (a dynamic cache concatenates), in any
    step: `executed` counts the same of a model.
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
        np.array([host_index_of(point.gpu) for point in points]),
        np.array([point.batch for point in points]),
    )


_SMALL_INSTANCES = ("P4", "P100", "V100", "T4", "L4", "A10", "A16", "A2")
SMALL_INSTANCE_INDEX = 1.4
"""Cards that are mostly rented with a few virtual cores of an older server, and how much longer these dispatch a layer:
eager steps that no roof explains take 1.06 ms a layer of gemma-2b on an A10G and 1.08 of Qwen2.5-3B on a T4, against
0.66 to 0.78 on the hosts of an RTX 4090 and of an A100 (published.csv)."""


def host_index_of(gpu: str) -> float:
    """How long the host that a card is mostly rented with dispatches, against those of larger cards."""
    word = gpu.split()[0]
    return SMALL_INSTANCE_INDEX if word in (*_SMALL_INSTANCES, "A10G") else 1.0


def peak_of(sheet: Datasheet, format_: str, dtype: str = "float16") -> float:
    """The dense peak that products of this format run under, in a model of this dtype.

    16 bits where the card has no unit of fewer. float32 is that of plain float32: torch takes no TF32 for its products
    unless told. Raises RequestError where the table has no rate of it.
    """
    if format_ == "fp8" and sheet.peak_fp8_flops_per_s:
        return sheet.peak_fp8_flops_per_s
    peak = sheet.peak_fp32_flops_per_s if dtype == "float32" else sheet.peak_fp16_flops_per_s
    if peak is None:
        raise RequestError(
            f"{sheet.gpu}: the table has no rate of its products in {dtype}; ask for --dtype bfloat16 or another card."
        )
    return peak


_GRIDS = {
    "memory": np.geomspace(0.2, 1.0, 14),
    "compute": np.geomspace(0.2, 1.0, 28),
    "layer_s": np.geomspace(1e-4, 4e-3, 20),
    "layer_cycles": np.geomspace(3e4, 6e5, 16),
}
_FINER = np.geomspace(0.87, 1.15, 13)
"""Around the best of a grid, as factors of it: each grid's steps are less than twice as wide."""
_LEAST_POINTS = 12
_LEAST_CARDS = 4
"""Below these, the points of both kinds of decode, or of all formats of the engine, tell how far figures stray."""
_PULL = 0.6
"""How much a share that the points do not tell is pulled towards what is known of others: a factor of e costs as much
as the points of one card being off by a factor of e to the power of this."""
_OUTSIDE = {
    "eager": Shares(0.75, 0.60, layer_s=7e-4),
    "compiled": Shares(0.75, 0.60, layer_cycles=1e5),
    "llama.cpp": Shares(0.75, 0.60, layer_cycles=1e5),
}
"""Before any point is seen: what healthy cards reach in copies and large products (gpus.csv); some 40 launches a layer
at 10 to 20 us with Python in between, and where a graph or C++ launches some ten kernels that take 5 us each to start
and drain, at 2 GHz. An engine either keeps its card waiting for the host or it does not: the other share is none."""


def fit_efficiency(points: Sequence[Published], near: Shares) -> Shares:
    """The shares that come nearest to the points: the least |log(published / predicted)|, every card counting alike,
    and pull towards `near`. On a grid, then on a finer one around its best: streaming and layers together, since a step
    tells them apart by its model's size alone."""
    work, log_s = steps_of(points), np.log([point.latency_s for point in points])
    of_card = Counter(point.gpu for point in points)
    weight = np.array([1 / of_card[point.gpu] for point in points])
    streaming = ("memory", "layer_s" if near.layer_s else "layer_cycles")

    def best_of(values: dict[str, Array], shares: Shares) -> Shares:
        axes = np.meshgrid(*values.values(), indexing="ij")
        every: dict[str, Any] = {name: axis.reshape(-1, 1) for name, axis in zip(values, axes, strict=True)}
        off = (weight * np.abs(log_s - np.log(replace(shares, **every).step_s(work)))).sum(axis=1)
        pull = sum(_PULL * np.log(tried[:, 0] / getattr(near, name)) ** 2 for name, tried in every.items())
        chosen: dict[str, Any] = {name: float(tried[np.argmin(off + pull), 0]) for name, tried in every.items()}
        return replace(shares, **chosen)

    best = near
    for names in (streaming, ("compute",)):
        best = best_of({name: np.append(_GRIDS[name], getattr(best, name)) for name in names}, best)
    finer = {name: getattr(best, name) * _FINER for name in streaming}
    return best_of({**finer, "memory": np.minimum(finer["memory"], 1.0)}, best)


def dense_shares(points: Sequence[Published], kind: EngineKind) -> Shares:
    """What one engine kind attains with dense weights, which most figures are of."""
    dense = [point for point in points if point.kind == kind and _family(point) == "dense"]
    return fit_efficiency(dense, _OUTSIDE[kind]) if dense else _OUTSIDE[kind]


def shares_of(points: Sequence[Published], kind: EngineKind, family: str, dense: Shares) -> Shares:
    """What it attains with one format family; `dense` tells of what its points leave open."""
    own = [point for point in points if point.kind == kind and _family(point) == family]
    return fit_efficiency(own, dense) if own and family != "dense" else dense


def _family(point: Published) -> str:
    return family_of(point.format, point.batch, point.query_tokens)


def residuals(points: Sequence[Published], shares: Shares) -> Array:
    """log(published / typical) of each."""
    return np.asarray(np.log([point.latency_s for point in points]) - np.log(shares.step_s(steps_of(points))))


@dataclass(frozen=True)
class Stray:
    """How far a published figure lies from what a fit says that has not seen its card, or its model."""

    point: Published
    log_ratio: float
    without: Literal["gpu", "model"]


def strays(points: Sequence[Published], kind: EngineKind) -> list[Stray]:
    """Every point of an engine kind twice: by a fit without its card, and by one without its model."""
    found: list[Stray] = []
    of_kind = [point for point in points if point.kind == kind]
    axes: tuple[Literal["gpu", "model"], ...] = ("gpu", "model")
    for name in axes:
        for value in sorted({getattr(point, name) for point in of_kind}):
            inside = [point for point in of_kind if getattr(point, name) == value]
            others = [point for point in of_kind if getattr(point, name) != value]
            dense = dense_shares(others, kind)
            for family in sorted({_family(point) for point in inside}):
                chosen = [point for point in inside if _family(point) == family]
                shares = shares_of(others, kind, family, dense)
                found += [
                    Stray(*pair, name) for pair in zip(chosen, map(float, residuals(chosen, shares)), strict=True)
                ]
    return found


def attained_by(
    points: Sequence[Published], kind: EngineKind, family: str, left_out: Sequence[Stray] | None = None
) -> Attained:
    """What one engine kind attains with one format family, from these points alone."""
    found = strays(points, kind) if left_out is None else left_out
    own = [stray for stray in found if _family(stray.point) == family]
    kinds: tuple[StepKind, ...] = get_args(StepKind)
    spread = {kind: _spread(own, found, kind) for kind in kinds}
    mine = {stray.point for stray in own}
    return Attained(
        kind,
        family,
        shares_of(points, kind, family, dense_shares(points, kind)),
        spread,
        len(mine),
        len({point.gpu for point in mine}),
        len({point.model for point in mine}),
    )


def _kind(point: Published) -> StepKind:
    if point.phase == "prefill":
        return "prefill"
    return "one sequence" if point.batch == 1 else "several sequences"


def _spread(own: Sequence[Stray], of_engine: Sequence[Stray], kind: StepKind) -> tuple[float, float]:
    """Factors (low, high) that are to hold nine in ten of a card, or a model, that was not seen: as far to one side as
    to the other, since too few cards tell each side's own tail.

    The figures of one card are not independent, so that the number of cards (and of models) decides how much wider than
    the left-out figures themselves the range must be: as Student's t is than the normal distribution.
    """
    phase: Phase = "prefill" if kind == "prefill" else "decode"
    chosen = [stray for stray in of_engine if stray.point.phase == phase]
    nearer = (
        [stray for stray in own if _kind(stray.point) == kind],
        [stray for stray in own if stray.point.phase == phase],
    )
    for some in nearer:
        if len(some) >= _LEAST_POINTS and len({stray.point.gpu for stray in some}) >= _LEAST_CARDS:
            chosen = some
            break
    if len({stray.point.gpu for stray in chosen}) < _LEAST_KIND_CARDS:
        return _UNKNOWN
    spread = _LEAST_SPREAD
    for name in ("gpu", "model"):
        of_axis = [stray for stray in chosen if stray.without == name]
        if not of_axis:
            continue
        off = np.abs([stray.log_ratio for stray in of_axis])
        wider = _student(len({getattr(stray.point, name) for stray in of_axis}))
        spread = max(spread, wider * float(np.quantile(off, RANGE_SHARE)))
    return math.exp(-spread), math.exp(spread)


_LEAST_KIND_CARDS = 3
_UNKNOWN = (0.5, 2.0)
"""Of fewer cards no spread can be told: half to twice is what calculators are off by."""
_LEAST_SPREAD = math.log(1.05)
_STUDENT = {2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13, 6: 2.02, 7: 1.94, 8: 1.89, 9: 1.86, 10: 1.83}
_NORMAL = 1.645
_MOST_WIDER = 1.8


def _student(groups: int) -> float:
    """The 95th percentile of Student's t of so many groups over the normal distribution's."""
    return min(_MOST_WIDER, _STUDENT.get(groups, 1.8 if groups > 10 else 6.31) / _NORMAL)


@cache
def attained(kind: EngineKind, family: str) -> Attained:
    """Shares fitted to all published points."""
    return attained_by(published(), kind, family, _strays(kind))


@cache
def _strays(kind: EngineKind) -> list[Stray]:
    return strays(published(), kind)


@dataclass(frozen=True)
class WorkAt:
    """The work of many steps, as arrays of one length."""

    flops: Array
    weight_bytes: Array
    kv_bytes: Array
    """Of the cache: read, written, and what plain transformers move of it besides."""

    def at(self, chosen: Array) -> WorkAt:
        """The steps that `chosen` (bool or int [n]) picks."""
        return WorkAt(self.flops[chosen], self.weight_bytes[chosen], self.kv_bytes[chosen])


def executed(needed: OperatorArrays, engine: EngineKind) -> WorkAt:
    """The algorithm's work; of plain transformers (`eager`) also what their cache and attention add with the context:
    copies, a latent expanded again, heads and scores written out.

    What else they do beyond the algorithm (operands between kernels, dequantising) is in what they attain.
    """
    zeros = np.zeros(len(needed.steps))
    causes = OF_CONTEXT if engine == "eager" else frozenset()
    flops, weight_bytes, kv_bytes = zeros.copy(), zeros.copy(), zeros.copy()
    for column in needed.columns:
        flops += column.flops + sum((column.avoidable_flops.get(cause, 0.0) for cause in causes), zeros)
        weight_bytes += column.weight_bytes
        kv_bytes += column.kv_bytes + sum((column.avoidable_bytes.get(cause, 0.0) for cause in causes), zeros)
    return WorkAt(flops, weight_bytes, kv_bytes)


CONTEXT_BYTES = 600_000_000
"""What CUDA, its modules and cuBLAS's workspace take beside a model (0.5 to 0.8 GB on cards of the last years)."""
NO_MIXTURE = "No published figure of a mixture of experts is behind these ranges: how often they hold one is not known."


def basis_for(format_: str, engine: EngineKind) -> EngineKind | None:
    """The engine whose published figures tell of a format: the one asked for, or the one that has some."""
    has = {point.kind for point in published() if point.format == format_}
    return engine if engine in has else "compiled" if "compiled" in has else None


def card_steps(
    sheet: Datasheet, work: WorkAt, batch: Array, *, peak: float, layers: int, host_index: float
) -> CardSteps:
    """Steps of that work as a card's range wants them; `peak` is that of what they multiply in (`peak_of`)."""

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
