"""Compare the ranks of a tensor-parallel run: the slowest, and the step time predicted from ranks and link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from profiler.facts.run_facts import Facts
from profiler.grid.cells import CellKey
from profiler.judge.cells import KeyedRecord, columns_of
from profiler.judge.demand import breakdown_of, exchanged_s

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
