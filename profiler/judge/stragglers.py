"""Ranks of a tensor-parallel run compared: who is slow, and what their shares and the link predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from profiler.facts.run_facts import Facts
from profiler.grid.cells import CellKey
from profiler.judge.cells import Keyed, columns_of
from profiler.judge.demand import breakdown_of, exchanged_s

STRAGGLES = 0.1
"""A rank that needs this much longer than the fastest holds the others up by more than noise between processes."""


@dataclass(frozen=True)
class RankStep(Keyed):
    """A cell's step, rank by rank."""

    own_s: tuple[float, ...]
    """Seconds of each rank's own share, with nothing exchanged."""
    last_s: float
    """Seconds if every exchange waits for the last rank."""
    exchanged_s: float
    """What the collectives take, by the measured link."""
    measured_s: float
    hidden_s: float = 0.0
    """Of the shares, what a device waits for its host in them, and not while the link is busy."""

    @property
    def predicted_s(self) -> float:
        """The shares and then the link: collectives wait for the last rank, and no arithmetic hides them."""
        return self.last_s + self.exchanged_s - self.hidden_s

    @property
    def slowest(self) -> int:
        return self.own_s.index(max(self.own_s))

    @property
    def behind(self) -> float:
        """How much longer the slowest needs than the fastest, as a share."""
        return max(self.own_s) / min(self.own_s) - 1


def rank_steps(facts: Facts, latencies_s: Mapping[CellKey, float]) -> tuple[RankStep, ...]:
    """Every measured step whose shares were timed alone."""
    found = []
    apart = replace(facts, ceilings=replace(facts.ceilings, collective=None))
    for key, latency_s in latencies_s.items():
        own = facts.rank_steps.get(key.cell)
        if own is not None and latency_s == latency_s and (seconds := own.seconds(key.phase)):
            exchanged = exchanged_s(facts, key)
            last_s = own.last_s(key.phase)
            waits_s = [
                breakdown_of(each, key, latency)[0].dispatch_s
                for each, latency in ((apart, last_s), (facts, latency_s))
            ]
            hidden_s = max(0.0, waits_s[0] - waits_s[1]) if facts.device.overlaps_dispatch else 0.0
            found.append(
                RankStep(
                    **columns_of(key), own_s=seconds, last_s=last_s, exchanged_s=exchanged, measured_s=latency_s,
                    hidden_s=hidden_s,
                )
            )  # fmt: skip
    return tuple(found)


def straggler(steps: Sequence[RankStep]) -> tuple[int, float] | None:
    """(rank, by which share it lies behind) where the same rank is the slowest of most steps by more than noise."""
    behind = [step for step in steps if step.behind > STRAGGLES]
    if not behind:
        return None
    ranks = [step.slowest for step in behind]
    slowest = max(set(ranks), key=ranks.count)
    if ranks.count(slowest) * 2 <= len(steps):
        return None
    shares = sorted(step.behind for step in behind if step.slowest == slowest)
    return slowest, shares[len(shares) // 2]
