"""The one floor, max(F/P, B/W): of an operator, of a step, of many steps, and on another GPU by its datasheet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from profiler.counting.operators import ModelWork, Operator
from profiler.data.datasheets import Datasheet
from profiler.facts.operators import OperatorWork
from profiler.facts.step import ExecutionPath, Step
from profiler.units import scaled

A = TypeVar("A", float, NDArray[np.float64])
"""A number, or one per step."""


def larger(left: A | float, right: A) -> A:
    """The larger of two numbers, or of each pair where one of them is an array."""
    arrays = isinstance(left, np.ndarray) or isinstance(right, np.ndarray)
    return cast(A, np.maximum(left, right) if arrays else max(left, right))


def where(condition: Any, value: A) -> A:
    """`value` where the condition holds, else 0; of numbers or of arrays."""
    if isinstance(condition, np.ndarray):
        return cast(A, np.where(condition, value, 0.0))
    nothing: Any = 0.0
    return value if condition else nothing  # not 0 * value, which is no number where value is infinite


def floor_s(flops: A, nbytes: A, flops_per_s: A | float, bytes_per_s: A | float) -> A:
    """max(F/P, B/W): the least seconds for so much work under two roofs, of one step or of many.

    S. Williams, A. Waterman, D. Patterson: Roofline, Communications of the ACM 52(4), 2009.
    """
    return larger(flops / flops_per_s, nbytes / bytes_per_s)


@dataclass(frozen=True)
class StepFloor:
    """The least time of a step under two roofs: the sum of its operators' own floors, by the side that binds each."""

    compute_s: float
    memory_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.memory_s

    @property
    def bound(self) -> Literal["compute", "memory"]:
        """The side on which the larger part lies."""
        return "compute" if self.compute_s > self.memory_s else "memory"


def step_floor(parts: Iterable[tuple[float, float, float]], bytes_per_s: float) -> StepFloor:
    """The floor of a step of many operators, each given as (FLOPs, bytes, FLOP/s of its dtype)."""
    compute_s = memory_s = 0.0
    for flops, nbytes, flops_per_s in parts:
        seconds = floor_s(flops, nbytes, flops_per_s, bytes_per_s)
        if seconds == nbytes / bytes_per_s:
            memory_s += seconds
        else:
            compute_s += seconds
    return StepFloor(compute_s, memory_s)


@dataclass(frozen=True)
class CardFloor:
    """One step on one card, by its dense datasheet peaks."""

    gpu: str
    dtype: str
    """The model's, or the one of as many bits that this card has units for."""
    ridge_flops_per_byte: float | None
    """Of that dtype; None where the table has no rate for it."""
    floor_s: float | None
    """Sum over operators of max(FLOPs / peak, bytes / bandwidth); None where the model does not fit or has no rate."""
    bound: Literal["compute", "memory"] | None
    """The side on which the larger part of the floor lies."""
    needs_bytes: float
    """Predicted peak memory of the step."""
    memory_bytes: int

    @property
    def refusal(self) -> str | None:
        """Why there is no floor, in a line; None where there is one."""
        if self.floor_s is not None:
            return None
        if self.ridge_flops_per_byte is None:
            return f"{self.gpu}: the table has no rate of its products in {self.dtype}"
        return (
            f"{self.gpu}: does not fit; the step needs {scaled(self.needs_bytes, 'B')}, the card has"
            f" {scaled(self.memory_bytes, 'B')}"
        )


def floor_on(card: Datasheet, operators: Sequence[OperatorWork], dtype: str, needs_bytes: float) -> CardFloor:
    """The floor of a step of these operators on a card, for a model of `dtype` that needs so much memory.

    Cards without bfloat16 units run in float16, which has the same bytes. An operator whose dtype a card has no unit
    for runs in the model's.
    """
    if dtype == "bfloat16" and card.peak_bf16_flops_per_s is None:
        dtype = "float16"
    own = card.peak_flops_per_s(dtype)
    floor = None
    if own is not None and needs_bytes <= card.memory_bytes:
        floor = step_floor(
            ((item.flops, item.model_bytes, card.peak_flops_per_s(item.dtype) or own) for item in operators),
            card.bandwidth_bytes_per_s,
        )
    return CardFloor(
        gpu=card.gpu,
        dtype=dtype,
        ridge_flops_per_byte=card.ridge_flops_per_byte(dtype),
        floor_s=floor.total_s if floor else None,
        bound=floor.bound if floor else None,
        needs_bytes=needs_bytes,
        memory_bytes=card.memory_bytes,
    )


@dataclass(frozen=True)
class RoofSet:
    """The roofs that figures are placed under."""

    name: str
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """By dtype."""
    memory_bytes: int | None = None

    @property
    def device(self) -> str:
        """The card's or the machine's own name."""
        return self.name.rpartition(", ")[0]

    def peak(self, dtype: str, own: str) -> float:
        """Of a dtype that has no unit here the model's own, or float32's, holds."""
        for name in (dtype, own, "float32"):
            if self.flops_per_s.get(name):
                return self.flops_per_s[name]
        return max(self.flops_per_s.values())


_Array = NDArray[Any]


def roof_times(
    work: ModelWork, step: Step, under: RoofSet, dtype: str, width: _Array, kv: _Array
) -> tuple[_Array, _Array]:
    """Seconds by side of the steps of an array: sum over operators of max(FLOPs / peak, bytes / bandwidth).

    `width` are bytes a weight, `kv` those of an element of the cache, where a file tells them; 0 where it does not.
    """
    zeros = np.zeros_like(np.asarray(step.batch), dtype=np.float64)
    compute_s, memory_s = zeros.copy(), zeros.copy()
    for operator in work.operators:
        need = operator.work(step, ExecutionPath())
        weights = need.weight_bytes * np.where(width > 0, width / _itemsize(operator), 1.0)
        cache = (need.kv_read_bytes + need.kv_write_bytes) * np.where(kv > 0, kv / operator.dtype.itemsize, 1.0)
        nbytes = zeros + weights + cache + need.embedding_bytes + need.logits_bytes
        peak = under.peak(operator.dtype_name, dtype)
        seconds = floor_s(zeros + need.model_flops, nbytes, peak, under.bytes_per_s)
        by_compute = seconds > nbytes / under.bytes_per_s
        compute_s += where(by_compute, seconds)
        memory_s += where(~by_compute, seconds)
    return compute_s, memory_s


def _itemsize(operator: Operator) -> float:
    """Bytes of one weight as it was counted; those that a quantisation wrote fewer for keep their own count."""
    return max(1.0, float(operator.dtype.itemsize))
