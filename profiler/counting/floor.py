"""The roofline floor, max(F/P, B/W), of operators and steps, on other GPUs too, and what verifying drafts can gain."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from profiler.counting.operators import Collective, Experts, Linear, ModelWork, Operator
from profiler.data.ceiling_set import CeilingSet
from profiler.data.datasheets import Datasheet
from profiler.data.free_memory import SURE_SHARE
from profiler.data.links import Link
from profiler.facts.operators import OperatorWork
from profiler.facts.step import Count, ExecutionPath, Step
from profiler.units import scaled

A = TypeVar("A", float, NDArray[np.float64])
"""A number, or an array with one per step."""


def larger(left: A | float, right: A) -> A:
    """Return the maximum of two numbers, element by element if one is an array."""
    arrays = isinstance(left, np.ndarray) or isinstance(right, np.ndarray)
    return cast(A, np.maximum(left, right) if arrays else max(left, right))


def where(condition: Any, value: A) -> A:
    """Return `value` if the condition is true, else 0; for numbers or arrays."""
    if isinstance(condition, np.ndarray):
        return cast(A, np.where(condition, value, 0.0))
    nothing: Any = 0.0
    return value if condition else nothing  # not 0 * value, which is NaN for an infinite value


def floor_s(flops: A, nbytes: A, flops_per_s: A | float, bytes_per_s: A | float) -> A:
    """Return max(F/P, B/W), the least seconds under two ceilings (Williams, Waterman, Patterson, CACM 52(4), 2009)."""
    return larger(flops / flops_per_s, nbytes / bytes_per_s)


@dataclass(frozen=True)
class StepFloor:
    """The least time of a step under two ceilings: its operators' floors, by the ceiling that limits each.

    Numbers, or arrays with one per step.
    """

    compute_s: Any
    memory_s: Any

    @property
    def floor_s(self) -> Any:
        return self.compute_s + self.memory_s

    @property
    def bound(self) -> Any:
        """`compute` or `memory`: the ceiling that limits the larger part."""
        return np.where(self.compute_s > self.memory_s, "compute", "memory")


def step_floor(parts: Iterable[tuple[float, float, float]], bytes_per_s: float) -> StepFloor:
    """Return the floor of a step; each part is an operator's (FLOPs, bytes, FLOP/s of its dtype)."""
    compute_s = memory_s = 0.0
    for flops, nbytes, flops_per_s in parts:
        seconds = floor_s(flops, nbytes, flops_per_s, bytes_per_s)
        if seconds == nbytes / bytes_per_s:
            memory_s += seconds
        else:
            compute_s += seconds
    return StepFloor(compute_s, memory_s)


MOST = 1 << 24
"""The longest context and the largest batch that a search covers."""


def least(condition: Callable[[int], bool]) -> int | None:
    """Return the least number from 1 to MOST that meets a monotone condition, or None."""
    number = 1 + bisect_left(range(1, MOST + 1), True, key=condition)
    return number if number <= MOST else None


IN_CHUNKS = "in chunks: it fits if its prompts are prefilled in chunks, as servers do, and not in one step"
"""What it means that a decode step fits only on a server."""

NEEDS_LESS = "fewer bits (--quant) need less, and `roofscope rent` names GPUs on which it fits"
"""What to do about a step that does not fit."""

CLOSE = (
    "close to the limit: its tensors fit, but it runs out of memory if free memory is in pieces or 2 % less than stated"
)
"""What it means that a step fits only if free memory is in one piece, and all that is stated."""


@dataclass(frozen=True)
class GpuRow:
    """One step on one GPU, by its dense datasheet peaks."""

    gpu: str
    dtype: str
    """The model's dtype, or one with as many bits that this GPU has units for."""
    ridge_flops_per_byte: float | None
    """The ridge point of that dtype; null if the datasheet has no rate for it."""
    floor_s: float | None
    """Sum over operators of max(FLOPs / peak, bytes / bandwidth); null if the model does not fit or has no rate."""
    bound: Literal["compute", "memory"] | None
    """The ceiling that limits the larger part of the floor."""
    needs_bytes: float
    """Weights, KV cache and workspace: all tensors at their peak, or the least in chunks if that does not fit."""
    safe_bytes: float
    """The bytes with which the step runs, in whatever pieces free memory is."""
    room_bytes: int
    """What a model may take of the GPU's memory."""
    tight: bool
    """Whether the step fits, but runs out of memory if free memory is in pieces."""
    refusal: str | None
    """The reason why there is no floor, in one line; null if there is one."""
    one_token_floor_s: float | None = None
    """Of a step that verifies drafts: the floor of a step of one token in its place; else null."""
    pays_from: float | None = None
    """The probability of acceptance from which drafts pay at these floors; null if they never do."""
    in_chunks: bool = False
    """Whether it fits only if its prompts are prefilled in chunks, as servers do, with `needs_bytes`."""


def floor_on(
    card: Datasheet, operators: Sequence[OperatorWork], dtype: str, needs_bytes: float, safe_bytes: float, how: str = ""
) -> GpuRow:
    """Return the floor on a GPU of these operators of a model of `dtype`; float16 stands for a missing bfloat16.

    `how` is what a refusal says of `needs_bytes`.
    """
    if dtype == "bfloat16" and card.peak_bf16_flops_per_s is None:
        dtype = "float16"
    peak, room_bytes = card.peak_flops_per_s(dtype), card.room_bytes
    floor = refusal = None
    if peak is None:
        refusal = f"{card.gpu}: the datasheet table has no {dtype} rate"
    elif needs_bytes > room_bytes:
        needs, free = scaled(needs_bytes, "B"), scaled(room_bytes, "B")
        refusal = f"{card.gpu}: does not fit; the step needs {needs}{how}, the GPU has {free} free; {NEEDS_LESS}"
    else:
        parts = ((item.flops, item.model_bytes, card.peak_flops_per_s(item.dtype) or peak) for item in operators)
        floor = step_floor(parts, card.bandwidth_bytes_per_s)
    return GpuRow(
        gpu=card.gpu,
        dtype=dtype,
        ridge_flops_per_byte=card.ridge_flops_per_byte(dtype),
        floor_s=floor.floor_s if floor else None,
        bound=floor.bound.item() if floor else None,
        needs_bytes=needs_bytes,
        safe_bytes=max(needs_bytes, safe_bytes),
        room_bytes=room_bytes,
        tight=needs_bytes <= room_bytes and safe_bytes > SURE_SHARE * room_bytes,
        refusal=refusal,
    )


_Array = NDArray[Any]
DENSE_BYTES = 2.0
"""Bytes per weight below which weights are packed."""


def ceiling_times(
    work: ModelWork,
    step: Step,
    under: CeilingSet,
    dtype: str,
    width: _Array | float = 0.0,
    kv: _Array | float = 0.0,
    experts_width: _Array | None = None,
    packed_dtype: str = "",
) -> tuple[_Array, _Array]:
    """Return the seconds [n] that compute and memory limit, by operator max(FLOPs / peak, bytes / bandwidth).

    `width` [n] are bytes per weight, `experts_width` [n] those of experts if they differ, and `kv` [n] bytes per
    element of the cache, as a file reports them; 0 means as counted. Weights of less than 2 bytes multiply in
    `packed_dtype` if that has a higher rate.
    """
    zeros = np.zeros_like(np.asarray(step.batch), dtype=np.float64)
    compute_s, memory_s = zeros.copy(), zeros.copy()
    for operator in work.operators:
        need = operator.work(step, ExecutionPath())
        stored = experts_width if experts_width is not None and isinstance(operator, Experts) else width
        weights = need.weight_bytes * np.where(np.greater(stored, 0), stored / bytes_per_weight(operator), 1.0)
        cached = need.kv_read_bytes + need.kv_write_bytes
        cache = cached * np.where(np.greater(kv, 0), kv / operator.dtype.itemsize, 1.0)
        nbytes = zeros + weights + cache + need.state_bytes + need.embedding_bytes + need.logits_bytes
        peak: Any = under.peak(operator.dtype_name, dtype)
        if isinstance(operator, (Linear, Experts)):
            is_packed = np.where(stored > 0, stored, bytes_per_weight(operator)) < DENSE_BYTES
            peak = np.where(is_packed, max(peak, under.flops_per_s.get(packed_dtype, 0.0)), peak)
        seconds = floor_s(zeros + need.model_flops, nbytes, peak, under.bytes_per_s)
        by_compute = seconds > nbytes / under.bytes_per_s
        compute_s += np.where(by_compute, seconds, 0.0)
        memory_s += np.where(by_compute, 0.0, seconds)
    return compute_s, memory_s


def bytes_per_weight(operator: Operator) -> float:
    """Return the bytes of one weight of an operator as counted, with its scales; packed formats have less than 1."""
    if isinstance(operator, Linear):
        return operator.weight.weight_bytes / (operator.weight.in_features * operator.weight.out_features)
    if isinstance(operator, Experts):
        return operator.expert_bytes / sum(ins * outs for ins, outs in operator.matrices)
    return max(1.0, float(operator.dtype.itemsize))


def collectives_s(work: ModelWork, step: Step, path: ExecutionPath, link: Link) -> _Array:
    """Return the seconds [n] of one rank's collectives in steps of shape [n]; none overlaps another operator."""
    total = np.zeros_like(np.asarray(step.batch), dtype=np.float64)
    for operator in work.of_kind(Collective):
        nbytes = np.asarray(operator.each(step, path).link_bytes, dtype=np.float64)
        total = total + operator.count * link.seconds(operator.kind, nbytes, operator.ranks)
    return total


def verifying(batch: Count, drafted: int, context: Count) -> Step:
    """Return the step of `drafted` tokens per sequence and one more, with all their logits."""
    return Step(batch, 1 + drafted, context, requested=1 + drafted)


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Return a step's tokens if each draft is accepted alike: (1 - a^(k+1)) / (1 - a) (arXiv:2211.17192, 3.1)."""
    return sum(acceptance**place for place in range(drafted + 1))


def pays_from(cost: float, drafted: int) -> float | None:
    """Return the least acceptance, 0 to 1, that pays for a step of `cost` plain ones; None if none does."""
    if cost > drafted + 1:
        return None
    steps = 1 << 30
    return bisect_left(range(steps), cost, key=lambda step: expected_tokens(step / steps, drafted)) / steps
