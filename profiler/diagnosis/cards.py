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
    ridge_flops_per_byte: float
    """Of the model's dtype."""
    floor_s: float | None
    """Sum over operators of max(FLOPs / peak, bytes / bandwidth); None where the model does not fit."""
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
        return (
            f"{self.gpu}: does not fit; the step needs {scaled(self.needs_bytes, 'B')}, the card has"
            f" {scaled(self.memory_bytes, 'B')}"
        )


def floor_on(card: Datasheet, operators: Sequence[OperatorWork], dtype: str, needs_bytes: float) -> CardFloor:
    """The floor of a step of these operators on a card, for a model of `dtype` that needs so much memory.

    A dtype that the card has no unit for runs in the model's, or in float32.
    """
    own = card.peak_flops_per_s(dtype) or card.peak_flops_per_s("float32") or 0.0
    floor = step_floor(
        ((item.flops, item.model_bytes, card.peak_flops_per_s(item.dtype) or own) for item in operators),
        card.bandwidth_bytes_per_s,
    )
    fits = needs_bytes <= card.memory_bytes
    return CardFloor(
        gpu=card.gpu,
        ridge_flops_per_byte=own / card.bandwidth_bytes_per_s,
        floor_s=floor.total_s if fits else None,
        bound=floor.bound if fits else None,
        needs_bytes=needs_bytes,
        memory_bytes=card.memory_bytes,
    )
