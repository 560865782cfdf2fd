"""The operator groups of a step, with their work and the time of their replayed kernels."""

from __future__ import annotations

from dataclasses import dataclass

from profiler.grid.cells import CellKey
from profiler.judge.cells import CellResult
from profiler.report.selection import selected_cells
from profiler.store.folder import Run
from profiler.store.operators_csv import OPERATORS_FILE, replayed_operators


@dataclass(frozen=True)
class GroupPoint:
    """One group of operators in a step: its work, and the time of its kernels when they are replayed."""

    group: str
    flops: float
    nbytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """Model FLOPs per model byte."""
        return self.flops / self.nbytes

    @property
    def flops_per_s(self) -> float:
        """Achieved by the replayed kernels."""
        return self.flops / self.seconds


def group_points(run: Run) -> dict[CellResult, list[GroupPoint]]:
    """Return the groups with FLOPs and a replayed time, for the smallest and the largest cell of each phase.

    Empty for an old run, which has no operators.csv. Raises RunError if that file is damaged.
    """
    if not (run.folder / OPERATORS_FILE).exists():
        return {}
    cells = {cell.key: cell for cell in selected_cells(run)}
    sums: dict[CellKey, dict[str, list[float]]] = {}
    for key, item, replayed_s in replayed_operators(run.folder):
        if key in cells and item.flops:
            amounts = sums.setdefault(key, {}).setdefault(item.group, [0.0, 0.0, 0.0])
            amounts[0] += float(item.flops)
            amounts[1] += float(item.model_bytes)
            amounts[2] += replayed_s
    return {
        cells[key]: [GroupPoint(group, *amounts) for group, amounts in groups.items()] for key, groups in sums.items()
    }
