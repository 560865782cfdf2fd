"""Several GPUs of one kind compared: which of them underperforms, and where to look."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from profiler.facts.roofs import AGREE, Ceilings
from profiler.judge.cells import CellResult
from profiler.units import percent

_SURELY = 0.5
"""A card is slower where its intervals lie above the best card's in more than half of the cells."""


@dataclass(frozen=True)
class DeviceRun:
    """What one card measured."""

    device: str
    dtype: str
    results: Sequence[CellResult]
    ceilings: Ceilings


@dataclass(frozen=True)
class DeviceHealth:
    """One card against the best of all in each cell."""

    device: str
    behind: float
    """By which share its steps take longer (median over cells)."""
    surely: float
    """Share of the cells in which its interval lies wholly above the best card's."""
    memory_behind: float
    """By which share its memory roof lies below the highest."""
    compute_behind: float

    @property
    def ill(self) -> bool:
        """Slower by more than two measurements of one roof may lie apart, and not by noise."""
        return self.behind > AGREE and self.surely > _SURELY

    @property
    def words(self) -> str:
        """`cuda:1 is ill: its steps take 18 % longer; its memory roof lies 21 % below the best.`"""
        causes = [
            f"its {name} roof lies {percent(share)} below the best"
            for name, share in (("memory", self.memory_behind), ("compute", self.compute_behind))
            if share > AGREE
        ]
        why = " and ".join(causes) or "its roofs do not: look at its host, its slot and what else runs there"
        return f"{self.device} is ill: its steps take {percent(self.behind)} longer; {why}."


def healths(measured: Sequence[DeviceRun]) -> tuple[DeviceHealth, ...]:
    """Every card against the others, over the cells that all of them measured."""
    by_key: list[Mapping[object, CellResult]] = [
        {result.key: result for result in one.results if result.latency_s == result.latency_s} for one in measured
    ]
    common = [key for key in by_key[0] if all(key in other for other in by_key)]
    found = []
    for index, one in enumerate(measured):
        ratios, above = [], 0
        for key in common:
            best = min((results[key] for results in by_key), key=lambda result: result.latency_s)
            own = by_key[index][key]
            ratios.append(own.latency_s / best.latency_s - 1)
            above += own.latency_low_s > best.latency_high_s
        memory = max(other.ceilings.memory_bytes_per_s for other in measured)
        compute = max(other.ceilings.compute_flops_per_s(one.dtype) for other in measured)
        found.append(
            DeviceHealth(
                one.device,
                statistics.median(ratios) if ratios else 0.0,
                above / len(common) if common else 0.0,
                _below(one.ceilings.memory_bytes_per_s, memory),
                _below(one.ceilings.compute_flops_per_s(one.dtype), compute),
            )
        )
    return tuple(found)


def _below(roof_per_s: float, best_per_s: float) -> float:
    """By which share a roof lies below the best one; 0 where one of them is not known."""
    return 0.0 if math.isinf(best_per_s) else 1 - roof_per_s / best_per_s
