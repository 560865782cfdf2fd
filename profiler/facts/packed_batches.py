"""Packed linears against dense ones at several batches, and where the packed format starts or ceases to pay."""

from __future__ import annotations

from dataclasses import dataclass

from profiler.facts.fact import Fact


@dataclass(frozen=True)
class BatchTimes:
    """Seconds of all packed linears of a model in one decode step, and of dense ones in their place."""

    batch: int
    packed_s: float
    dense_s: float
    ratios: tuple[float, ...] = ()
    """Packed over dense seconds of each round, in which both took turns."""

    @property
    def pays(self) -> bool | None:
        """Whether the packed linears are faster; None if the rounds disagree."""
        faster = {ratio < 1 for ratio in self.ratios or (self.packed_s / self.dense_s,)}
        return faster.pop() if len(faster) == 1 else None


@dataclass(frozen=True)
class PackedBatches(Fact, kind="packed_batches"):
    """The packed linears of a model against dense ones of random values, at several batches."""

    format: str
    kernel: str
    """The operator that takes the longest in one call of a packed linear."""
    dense_dtype: str
    times: tuple[BatchTimes, ...]
    """One entry per batch, in ascending order."""
