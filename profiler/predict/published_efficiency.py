"""Ranges of step times on any GPU, from the efficiency that published results attained by engine and format."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from operator import itemgetter

import numpy as np

from profiler.counting.floor import floor_s
from profiler.counting.memory_need import path_on
from profiler.counting.operators import Experts
from profiler.counting.preset_counts import CountedModel
from profiler.data import rows_of
from profiler.data.datasheets import Datasheet
from profiler.data.published_results import ENGINE_WORDS, MIXTURE, EngineKind, coverages, formats_of
from profiler.errors import RequestError
from profiler.facts.operators import OF_CONTEXT, Cause, OperatorWork
from profiler.facts.step import ExecutionPath
from profiler.grid.cells import PHASES, Phase
from profiler.predict.operator_arrays import Array, Columnar, OperatorArrays, StepArrays, need_of_cells, operator_arrays
from profiler.quant.registry import FORMATS, published_as


@dataclass(frozen=True)
class WorkAt(Columnar):
    """The work of many steps as an engine executes them; arrays are [n]."""

    flops: Array
    weight_bytes: Array
    other_bytes: Array
    """Bytes of the cache, and in plain transformers of its copies and of dense copies of packed weights."""
    uncertain_bytes: Array
    """Those of all these bytes that a GPU need not move: routed experts, of which several tokens may choose the same,
    and dense copies that fit its L2."""


@dataclass(frozen=True)
class CardSteps(WorkAt):
    """Steps, each with its work and the GPU that executes it: arrays are [n], and a number is that of all."""

    layers: Array | float
    peak: Array | float
    """Dense FLOP/s in the dtype of the matmuls."""
    bandwidth: Array | float
    """Bytes/s by the datasheet."""
    clock: Array | float
    """Rated clock in Hz."""
    host_index: Array | float
    """Overhead relative to the typical host of the published figures."""
    batch: Array

    def floor_s(self) -> Array:
        """Seconds of each step [n] by the datasheet."""
        return floor_s(self.flops, self.weight_bytes + self.other_bytes, self.peak, self.bandwidth)

    def bound_s(self) -> Array:
        """Lower bound of each step [n] by the datasheet."""
        certain_bytes = self.weight_bytes + self.other_bytes - self.uncertain_bytes
        return floor_s(self.flops, certain_bytes, self.peak, self.bandwidth)


@dataclass(frozen=True)
class Range:
    """90 % ranges of step times in seconds; arrays are [n]."""

    low_s: Array
    typical_s: Array
    high_s: Array
    is_host: Array
    """bool[n]: whether the typical time is the host's overhead."""


@dataclass(frozen=True)
class Shares:
    """The efficiency of an engine with a format, on any GPU."""

    memory: float
    """Share of the datasheet's bandwidth, while it streams weights and cache."""
    compute: float
    """Share of the datasheet's dense peak, in matmuls."""
    layer_s: float = 0.0
    """Seconds of CPU overhead per layer, a lower bound on any GPU; 0 for graphs and C++."""
    layer_cycles: float = 0.0
    """GPU clock cycles per layer without streaming, in which kernels start, drain and wait for each other."""

    def compute_bound(self, work: CardSteps) -> Array:
        """bool[n]: whether the arithmetic of the linears takes longer than streaming their weights."""
        return np.asarray(work.flops / (self.compute * work.peak) > work.weight_bytes / (self.memory * work.bandwidth))

    def device_s(self, work: CardSteps) -> Array:
        """Seconds [n] of the device for each step."""
        bytes_per_s = self.memory * work.bandwidth
        linears_s = floor_s(work.flops, work.weight_bytes, self.compute * work.peak, bytes_per_s)
        return np.asarray(linears_s + work.other_bytes / bytes_per_s + self.layer_cycles * work.layers / work.clock)

    def host_s(self, work: CardSteps) -> Array:
        """Seconds [n] of the host to launch each step."""
        return np.asarray(self.layer_s * work.host_index * work.layers)

    def step_s(self, work: CardSteps) -> Array:
        """Seconds [n] of each step: the larger of the device's and the host's."""
        return np.asarray(np.maximum(self.device_s(work), self.host_s(work)))


@dataclass(frozen=True, kw_only=True)
class Efficiency(Shares):
    """The efficiency of an engine kind with a format family, and how far published figures deviate from it.

    A low and a high are factors of the typical time. Decoding one sequence streams weights, and published figures agree
    closely. Decoding several also reads caches of lengths that sources seldom state, and prefills may run in between.
    """

    kind: EngineKind
    family: str
    prefill_low: float
    prefill_high: float
    one_sequence_low: float
    one_sequence_high: float
    several_sequences_low: float
    several_sequences_high: float

    def range_s(self, work: CardSteps, phase: Phase) -> Range:
        """The range of each step of a phase, at least the datasheet's lower bound.

        Published decode steps are bound by streaming weights. A decode step of so large a batch that arithmetic binds
        it gets the wider of the ranges of decode and prefill.
        """
        typical, floor, bound = self.step_s(work), work.floor_s(), work.bound_s()
        low, high = np.full(len(typical), self.prefill_low), np.full(len(typical), self.prefill_high)
        if phase == "decode":
            low = np.where(work.batch == 1, self.one_sequence_low, self.several_sequences_low)
            high = np.where(work.batch == 1, self.one_sequence_high, self.several_sequences_high)
            arithmetic = self.compute_bound(work)
            low = np.where(arithmetic, np.minimum(low, self.prefill_low), low)
            high = np.where(arithmetic, np.maximum(high, self.prefill_high), high)
        at_least = np.maximum(floor, typical)
        is_host = self.host_s(work) > self.device_s(work)
        return Range(np.maximum(bound, low * typical), at_least, high * at_least, is_host)


def form_of(counted: CountedModel, quant: str) -> str:
    """The form whose figures are the basis of a model stored as `quant`."""
    return MIXTURE if any(isinstance(one, Experts) for one in counted.work.operators) else published_as(quant)


def family_of(form: str, writes_copies: bool) -> str:
    """The family of forms with similar kernels.

    bitsandbytes multiplies few rows by packed weights in 4 bits, and writes dense copies for more.
    """
    if form == "nf4":
        return "nf4, dense copies" if writes_copies else "nf4, fused"
    return form


SMALL_INSTANCE_INDEX = 1.4
"""Overhead per layer, relative to larger GPUs, of GPUs that are mostly rented with a few cores of an older server
(`small_host` of gpus.csv).

Eager steps far above their ceilings take 1.06 ms per layer for gemma-2b on an A10G and 1.08 ms for Qwen2.5-3B on a T4,
compared with 0.66 to 0.78 ms on the hosts of an RTX 4090 and an A100 (published.csv)."""


def host_index_of(sheet: Datasheet) -> float:
    """Overhead of the host with which a GPU is mostly rented, relative to the hosts of larger GPUs."""
    return SMALL_INSTANCE_INDEX if sheet.small_host else 1.0


def peak_of(sheet: Datasheet, format_: str, dtype: str = "float16") -> float:
    """The dense peak in FLOP/s of matmuls in a format, in a model of `dtype`.

    It is that of 16 bits if the GPU has no units for the format. For float32 it excludes TF32, which torch does not use
    for matmuls by default. Raises RequestError if the datasheet has no such peak.
    """
    if format_ == "fp8" and sheet.peak_fp8_flops_per_s:
        return sheet.peak_fp8_flops_per_s
    peak = sheet.peak_flops_per_s(dtype)
    if peak is None:
        raise RequestError(
            f"{sheet.gpu}: the datasheet has no peak for matmuls in {dtype}; use --dtype"
            f" {sheet.sustained_dtype} or another GPU."
        )
    return peak


@cache
def attained(kind: EngineKind, family: str) -> Efficiency:
    """The efficiency of an engine kind with a format family, fitted to all published figures.

    `python -m tests.published_fit` fits published.csv and writes the table.
    """
    rows = rows_of("published_efficiency.csv", Efficiency)
    return next(row for row in rows if (row.kind, row.family) == (kind, family))


def compiled_step_s(
    operators: Sequence[OperatorWork], sheet: Datasheet, quant: str, dtype: str, batch: int
) -> tuple[float, float, int] | None:
    """The range in seconds of a decode step in compiled engines on a GPU, and the number of figures behind it.

    None if no figure of the format is published, or the GPU has no kernels of it.
    """
    form = MIXTURE if any(item.group == "experts" for item in operators) else published_as(quant)
    published = (item for item in coverages() if (item.kind, item.form, item.phase) == ("compiled", form, "decode"))
    figures = sum(item.figures for item in published)
    if not figures or obstacle_on(sheet, "compiled", quant, None) or sheet.peak_flops_per_s(dtype) is None:
        return None
    names = ("flops", "weight_bytes", "kv_bytes")
    flops, *nbytes = (np.array([sum(float(getattr(item, name)) for item in operators)]) for name in names)
    steps = card_steps(
        sheet,
        WorkAt(flops, nbytes[0], nbytes[1], uncertain_bytes=np.zeros(1)),
        np.array([batch]),
        peak=peak_of(sheet, quant, dtype),
        layers=max((item.count for item in operators if item.group == "attention"), default=1),
    )
    found = attained("compiled", family_of(form, writes_copies=False)).range_s(steps, "decode")
    return float(found.low_s[0]), float(found.high_s[0]), figures


def executed(needed: OperatorArrays, engine: EngineKind, l2_bytes: float) -> WorkAt:
    """The algorithm's work, plus the redundant work of plain transformers (`eager`) that grows with the context.

    The latter are copies of the cache, repeated expansion of a latent, and materialised heads and scores. Dense copies
    of packed weights are included as well. Operands between kernels are part of the fitted efficiency. Kernels are
    assumed to read a shared prefix once per sequence, as all published ones do by default.
    """
    zeros = np.zeros(len(needed.steps))
    causes = OF_CONTEXT | {Cause.DEQUANTISATION} if engine == "eager" else {Cause.SHARED_READS}
    flops, weight_bytes, other_bytes, uncertain_bytes = zeros.copy(), zeros.copy(), zeros.copy(), zeros.copy()
    several = needed.steps.batch * needed.steps.query > 1
    for column in needed.columns:
        flops += column.flops + sum((column.redundant_flops.get(cause, 0.0) for cause in causes), zeros)
        weight_bytes += column.weight_bytes + column.redundant_bytes.get(Cause.REREAD_WEIGHTS, 0.0)
        other_bytes += column.kv_bytes + sum((column.redundant_bytes.get(cause, 0.0) for cause in causes), zeros)
        copied_bytes = column.redundant_bytes.get(Cause.DEQUANTISATION, zeros) if engine == "eager" else zeros
        uncertain_bytes += np.where(copied_bytes <= 2 * l2_bytes * column.source.count, copied_bytes, 0.0)
        if isinstance(column.source, Experts):
            uncertain_bytes += np.where(several, column.weight_bytes, 0.0)
    return WorkAt(flops, weight_bytes, other_bytes, uncertain_bytes)


# The lowest CUDA compute capability for weights that are published packed: vLLM's Mxfp4Config, and its documentation of
# FP8 and AWQ; transformers' quantizer_mxfp4 and quantizer_finegrained_fp8, which make the weights dense below it.
_OF_PUBLISHED: dict[tuple[EngineKind, str], float] = {
    ("compiled", "mxfp4"): 8.0,
    ("compiled", "fp8"): 7.5,
    ("compiled", "awq"): 7.5,
    ("eager", "mxfp4"): 7.5,
    ("eager", "fp8"): 8.9,
}


def obstacle_on(sheet: Datasheet, engine: EngineKind, format_: str, published: str | None) -> str:
    """Why an engine has no kernels on a GPU for a format of `--quant` or for weights `published` packed; else empty."""
    of_format = FORMATS[format_].least_capability if format_ in FORMATS else 0.0
    if sheet.vendor not in ("NVIDIA", "AMD"):
        return f"has no range, since no published figure is of a GPU of {sheet.vendor}"
    if sheet.vendor != "NVIDIA":
        return f"has neither published figures nor a known torchao kernel of {format_}" if of_format else ""
    needs = {
        # That of vLLM (0.14, docs/getting_started/installation/gpu).
        ENGINE_WORDS[engine]: 7.0 if engine == "compiled" else 0.0,
        format_: of_format,
        published or "": _OF_PUBLISHED.get((engine, published or ""), 0.0),
    }
    what, needed = max(needs.items(), key=itemgetter(1))
    has = float(sheet.compute_capability)
    return f"needs compute capability {needed} for {what}, and has {has}" if has < needed else ""


def no_basis(quant: str, engine: EngineKind) -> str:
    """Why a format of `--quant` has no range in an engine kind, and what has one, as the end of a sentence."""
    kinds: tuple[EngineKind, ...] = ("eager", "compiled")
    instead = [f"--engine {kind}" for kind in kinds if kind != engine and published_as(quant) in formats_of(kind)]
    instead.append("--quant " + ", ".join(name for name in FORMATS if published_as(name) in formats_of(engine)))
    return (
        f"no basis: no figure of {quant} in {ENGINE_WORDS[engine]} is published, and other engines have other kernels;"
        f" use {' or '.join(instead)}."
    )


def card_steps(sheet: Datasheet, work: WorkAt, batch: Array, *, peak: float, layers: int) -> CardSteps:
    """Steps of `work` on one GPU; `peak` is in FLOP/s (`peak_of`), `batch` is [n]."""
    return CardSteps(
        **vars(work),
        layers=layers,
        peak=peak,
        bandwidth=sheet.bandwidth_bytes_per_s,
        clock=sheet.rated_clock_hz,
        host_index=host_index_of(sheet),
        batch=batch,
    )


@dataclass(frozen=True)
class DatasheetSteps:
    """Steps of a model on a GPU that was not measured; arrays are [n]."""

    needed: OperatorArrays
    """Their work, and the memory that the cell of each needs."""
    on_gpu: CardSteps
    times: Range


def steps_by_datasheet(
    counted: CountedModel, quant: str, sheet: Datasheet, steps: StepArrays, engine: EngineKind
) -> DatasheetSteps:
    """The range of each step of a model, stored as `quant`, on a GPU.

    Raises RequestError if no figure of the format and engine kind is published, or the GPU has no kernels of them or
    no peak of the model's dtype.
    """
    format_, floor = published_as(quant), f"`roofscope count MODEL --gpu '{sheet.gpu}'` gives the least time of a step."
    if format_ not in formats_of(engine):
        raise RequestError(f"{sheet.gpu} has {no_basis(quant, engine)} {floor}")
    if why := obstacle_on(sheet, engine, format_, counted.published if quant == "none" else None):
        raise RequestError(f"{sheet.gpu} {why}; name another GPU, --engine or --quant. {floor}")
    peak, path = peak_of(sheet, format_, counted.dtype), ExecutionPath()
    if engine == "eager":
        path = ExecutionPath(attention=counted.attention, all_logits=not counted.work.keeps_last_logits)
    needed = operator_arrays(counted.work, steps, dict.fromkeys(PHASES, path), counted.weight_bytes)
    if engine == "eager":
        there = path_on(counted.work, counted.attention, fuses_grouped_heads=sheet.fuses_grouped_heads)
        needed = replace(needed, need=need_of_cells(counted.work, steps, there, counted.weight_bytes))
    on_gpu = card_steps(
        sheet,
        executed(needed, engine, sheet.l2_bytes or math.inf),
        steps.batch,
        peak=peak,
        layers=counted.work.layers,
    )
    count = len(steps)
    copied = (column.redundant_bytes.get(Cause.DEQUANTISATION, 0.0) for column in needed.columns)
    copied_bytes = np.asarray(sum(copied, np.zeros(count))).tolist()
    kinds = [(family_of(form_of(counted, quant), copied_bytes[at] > 0), steps.phase(at)) for at in range(count)]
    times = Range(np.zeros(count), np.zeros(count), np.zeros(count), np.zeros(count, dtype=bool))
    for family, phase in set(kinds):
        chosen = np.array([kind == (family, phase) for kind in kinds]).nonzero()[0]
        part = attained(engine, family).range_s(on_gpu.at(chosen), phase)
        for item in fields(times):
            getattr(times, item.name)[chosen] = getattr(part, item.name)
    return DatasheetSteps(needed, on_gpu, times)
