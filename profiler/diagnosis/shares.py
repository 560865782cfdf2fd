"""The ranks of a run beside each other: who is slow, and what their own shares and the link predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from profiler.diagnosis.cell import CellResult, Keyed, columns_of
from profiler.diagnosis.facts import Facts
from profiler.diagnosis.parts import exchanged_s

STRAGGLES = 0.1
"""A rank that needs this much longer than the fastest holds the others up by more than noise between processes."""


@dataclass(frozen=True)
class RankStep(Keyed):
    """A cell's step, rank by rank."""

    own_s: tuple[float, ...]
    """Seconds of each rank's own share, with nothing exchanged."""
    exchanged_s: float
    """What the collectives take, by the measured link."""
    measured_s: float

    @property
    def predicted_s(self) -> float:
        """The slowest rank's share, and then the link: collectives wait for the last, and hide behind nothing."""
        return max(self.own_s) + self.exchanged_s

    @property
    def slowest(self) -> int:
        return self.own_s.index(max(self.own_s))

    @property
    def behind(self) -> float:
        """How much longer the slowest needs than the fastest, as a share."""
        return max(self.own_s) / min(self.own_s) - 1


def rank_steps(facts: Facts, results: Sequence[CellResult]) -> tuple[RankStep, ...]:
    """Every measured step whose shares were timed alone."""
    found = []
    for result in results:
        own = facts.rank_steps.get(result.key.cell)
        if own is not None and result.latency_s == result.latency_s and (seconds := own.seconds(result.key.phase)):
            step = RankStep(
                **columns_of(result.key),
                own_s=seconds,
                exchanged_s=exchanged_s(facts, result.key),
                measured_s=result.latency_s,
            )
            found.append(step)
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
