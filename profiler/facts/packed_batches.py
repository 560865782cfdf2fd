"""Packed linears against dense ones at several batches, and where the packed format starts or ceases to pay."""

from __future__ import annotations

from collections.abc import Sequence
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


def paying_batches(times: Sequence[BatchTimes]) -> str:
    """Return in words where the packed format pays; empty without times.

    The break-even batch lies between the last batch of one side and the first of the other. Between them the rounds
    disagree, or no batch was timed.
    """
    if not times:
        return ""
    first, last = times[0].batch, times[-1].batch
    packed, dense = ([item.batch for item in times if item.pays is pays] for pays in (True, False))
    if not packed and not dense:
        return f"packed and dense weights are equally fast at batches {first} to {last}"
    if packed and dense and max(packed) < min(dense):
        return f"packed weights are faster up to batch {max(packed)}, dense ones from batch {min(dense)} on"
    if packed and dense and max(dense) < min(packed):
        return f"dense weights are faster up to batch {max(dense)}, packed ones from batch {min(packed)} on"
    if packed and dense:
        return f"packed weights are faster only at batches {', '.join(map(str, packed))}"
    side, batches = ("packed", packed) if packed else ("dense", dense)
    if len(batches) == len(times):
        return f"{side} weights are faster at batches {first} to {last}"
    of_batches = f"batch{'' if len(batches) == 1 else 'es'} {', '.join(map(str, batches))}"
    return f"{side} weights are faster at {of_batches}; at the others rounds disagree"
