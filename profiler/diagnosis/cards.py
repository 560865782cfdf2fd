"""What another card's datasheet allows a step: its floor there, or that it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from profiler.diagnosis.facts import OperatorWork
from profiler.diagnosis.step_time import step_floor
from profiler.machine.datasheet import Datasheet
from profiler.units import scaled


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
