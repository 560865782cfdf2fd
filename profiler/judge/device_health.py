"""Compare GPUs: several of one kind, and the ranks that share a model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from profiler.facts.roofs import AGREE, Ceilings
from profiler.facts.run_facts import Facts
from profiler.grid.cells import CellKey
from profiler.judge.cells import CellResult, KeyedRecord, columns_of, difference_of
from profiler.judge.demand import breakdown_of, exchanged_s
from profiler.units import percent

_CERTAIN_SHARE = 0.5
"""A GPU counts as slower if it is slower than the best GPU in more than this share of the cells."""


@dataclass(frozen=True)
class DeviceRun:
    """The measurements on one GPU."""

    device: str
    dtype: str
    results: Sequence[CellResult]
    ceilings: Ceilings


@dataclass(frozen=True)
class DeviceHealth:
    """One GPU, compared with the fastest GPU of each cell."""

    device: str
    behind: float
    """Its steps take longer by this share (median over cells)."""
    surely: float
    """Share of the cells in which it is slower than the fastest GPU, by more than noise."""
    memory_behind: float
    """Its memory roof is below the highest one by this share."""
    compute_behind: float
    """Its compute roof is below the highest one by this share."""

    @property
    def ill(self) -> bool:
        """Whether it is slower by more than noise, and by more than two measurements of one roof may differ."""
        return self.behind > AGREE and self.surely > _CERTAIN_SHARE

    @property
    def words(self) -> str:
        """Such as `cuda:1 underperforms: its steps take 18 % longer; its memory roof is 21 % below the best.`"""
        causes = [
            f"its {name} roof is {percent(share)} below the best"
            for name, share in (("memory", self.memory_behind), ("compute", self.compute_behind))
            if share > AGREE
        ]
        why = " and ".join(causes) or "its roofs are as high: check its host, its slot and other processes on it"
        return f"{self.device} underperforms: its steps take {percent(self.behind)} longer; {why}."


def healths(measured: Sequence[DeviceRun]) -> tuple[DeviceHealth, ...]:
    """The health of every GPU, over the cells that all of them measured."""
    by_key: list[Mapping[object, CellResult]] = [
        {result.key: result for result in run.results if result.latency_s == result.latency_s} for run in measured
    ]
    common = [key for key in by_key[0] if all(key in results for results in by_key)]
    rows = []
    for run, own in zip(measured, by_key, strict=True):
        ratios, above = [], 0
        for key in common:
            best = min((results[key] for results in by_key), key=lambda result: result.latency_s)
            ratios.append(own[key].latency_s / best.latency_s - 1)
            above += difference_of(best, own[key]).verdict == "slower"
        memory = max(other.ceilings.memory_bytes_per_s for other in measured)
        compute = max(other.ceilings.compute_flops_per_s(run.dtype) for other in measured)
        rows.append(
            DeviceHealth(
                run.device,
                statistics.median(ratios) if ratios else 0.0,
                above / len(common) if common else 0.0,
                _below(run.ceilings.memory_bytes_per_s, memory),
                _below(run.ceilings.compute_flops_per_s(run.dtype), compute),
            )
        )
    return tuple(rows)


def _below(roof_per_s: float, best_per_s: float) -> float:
    """The share by which a roof is below the best one; 0 if the best one is unknown."""
    return 0.0 if math.isinf(best_per_s) else 1 - roof_per_s / best_per_s


STRAGGLES = 0.1
"""The share by which a rank's time exceeds the fastest rank's, from which it is more than noise between processes."""


@dataclass(frozen=True)
class RankStep(KeyedRecord):
    """The step of a cell, by rank."""

    own_s: tuple[float, ...]
    """Seconds of each rank's part of the model, without collectives."""
    last_s: float
    """Seconds if every collective waits for the last rank."""
    exchanged_s: float
    """Seconds of the collectives, by the measured link."""
    measured_s: float
    hidden_s: float = 0.0
    """Seconds of the parts in which a device waits for its host, and which overlap the link in the whole step."""

    @property
    def predicted_s(self) -> float:
        """Seconds of the parts and then of the link, since collectives wait for the last rank without overlap."""
        return self.last_s + self.exchanged_s - self.hidden_s

    @property
    def slowest(self) -> int:
        return self.own_s.index(max(self.own_s))

    @property
    def lag(self) -> float:
        """The share by which the slowest rank takes longer than the fastest."""
        return max(self.own_s) / min(self.own_s) - 1


def rank_steps(facts: Facts, latencies_s: Mapping[CellKey, float]) -> tuple[RankStep, ...]:
    """Every measured step for which the ranks were timed without collectives."""
    steps = []
    without_link = replace(facts, ceilings=replace(facts.ceilings, collective=None))
    for key, latency_s in latencies_s.items():
        ranks = facts.rank_steps.get(key.cell)
        if ranks is not None and latency_s == latency_s and (own_s := ranks.seconds(key.phase)):
            last_s = ranks.last_s(key.phase)
            wait_s, linked_wait_s = (
                breakdown_of(each, key, step_s)[0].dispatch_s
                for each, step_s in ((without_link, last_s), (facts, latency_s))
            )
            steps.append(
                RankStep(
                    **columns_of(key),
                    own_s=own_s,
                    last_s=last_s,
                    exchanged_s=exchanged_s(facts, key),
                    measured_s=latency_s,
                    hidden_s=max(0.0, wait_s - linked_wait_s) if facts.device.overlaps_dispatch else 0.0,
                )
            )
    return tuple(steps)


def straggler(steps: Sequence[RankStep]) -> tuple[int, float] | None:
    """(rank, median of `RankStep.lag`) if one rank is the slowest of most steps by more than noise, else None."""
    uneven = [step for step in steps if step.lag > STRAGGLES]
    if not uneven:
        return None
    ranks = [step.slowest for step in uneven]
    slowest = max(set(ranks), key=ranks.count)
    if ranks.count(slowest) * 2 <= len(steps):
        return None
    shares = sorted(step.lag for step in uneven if step.slowest == slowest)
    return slowest, shares[len(shares) // 2]
