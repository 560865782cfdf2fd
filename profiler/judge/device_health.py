"""Compare several GPUs of one kind."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from profiler.facts.ceilings import AGREE, Ceilings
from profiler.judge.cells import CellResult, difference_of
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
    slower_share: float
    """Share of the cells in which it is slower than the fastest GPU, by more than noise."""
    memory_behind: float
    """Its memory ceiling is below the highest one by this share."""
    compute_behind: float
    """Its compute ceiling is below the highest one by this share."""

    @property
    def ill(self) -> bool:
        """Whether it is slower by more than noise, and by more than two measurements of one ceiling may differ."""
        return self.behind > AGREE and self.slower_share > _CERTAIN_SHARE

    @property
    def words(self) -> str:
        """Such as `cuda:1 underperforms: its steps take 18 % longer; its memory ceiling is 21 % below the best.`"""
        causes = [
            f"its {name} ceiling is {percent(share)} below the best"
            for name, share in (("memory", self.memory_behind), ("compute", self.compute_behind))
            if share > AGREE
        ]
        why = " and ".join(causes) or "its ceilings are as high: check its host, its slot and other processes on it"
        return f"{self.device} underperforms: its steps take {percent(self.behind)} longer; {why}."


def healths(measured: Sequence[DeviceRun]) -> tuple[DeviceHealth, ...]:
    """The health of every GPU, over the cells that all of them measured."""
    by_key = [{row.key: row for row in run.results if not math.isnan(row.latency_s)} for run in measured]
    common = [key for key in by_key[0] if all(key in results for results in by_key)]
    best = {key: min((results[key] for results in by_key), key=lambda row: row.latency_s) for key in common}
    rows = []
    for run, own in zip(measured, by_key, strict=True):
        memory = max(other.ceilings.memory_bytes_per_s for other in measured)
        compute = max(other.ceilings.compute_flops_per_s(run.dtype) for other in measured)
        rows.append(
            DeviceHealth(
                run.device,
                statistics.median([own[key].latency_s / best[key].latency_s - 1 for key in common] or [0.0]),
                statistics.fmean([difference_of(best[key], own[key]).verdict == "slower" for key in common] or [0.0]),
                0.0 if math.isinf(memory) else 1 - run.ceilings.memory_bytes_per_s / memory,
                0.0 if math.isinf(compute) else 1 - run.ceilings.compute_flops_per_s(run.dtype) / compute,
            )
        )
    return tuple(rows)
