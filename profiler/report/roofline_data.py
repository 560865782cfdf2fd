"""Data of a roofline chart: ceilings, cells with their labels, and the operator groups of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from profiler.facts.ceilings import RESIDENT_GAIN, Ceiling, CurvePoint
from profiler.judge.cells import CellResult
from profiler.judge.demand import weight_read_share
from profiler.report.selection import selected_cells
from profiler.store.document import CeilingsRecord
from profiler.store.folder import Run
from profiler.store.operators_csv import OPERATORS_FILE, operator_rows
from profiler.units import duration, percent, scaled, significant

CeilingKind = Literal["measured", "other", "datasheet", "link", "cache"]


@dataclass(frozen=True)
class CeilingLine:
    """One ceiling: min(intensity x bandwidth, peak), drawn between two intensities."""

    kind: CeilingKind
    label: str
    bytes_per_s: float
    """The slope."""
    flops_per_s: float
    """The plateau."""
    from_intensity: float = 0.0
    """Where the drawn part begins: at the ridge if only the plateau is drawn."""
    to_intensity: float = math.inf
    """Where the drawn part ends: at the ridge if only the slope is drawn."""

    @property
    def ridge(self) -> float:
        """The intensity at which the slope meets the plateau."""
        return self.flops_per_s / self.bytes_per_s

    def at(self, intensity: float) -> float:
        """Return the FLOP/s limit at an intensity."""
        return min(intensity * self.bytes_per_s, self.flops_per_s)

    def corners(self, low: float, high: float) -> list[tuple[float, float]]:
        """Return (intensity, FLOP/s) of the ends and the bend of the part drawn between two intensities."""
        start, end = max(low, self.from_intensity), min(high, self.to_intensity)
        if start >= end:
            return []
        inside = [self.ridge] if start < self.ridge < end else []
        return [(x, self.at(x)) for x in (start, *inside, end)]


def ceiling_lines(run: Run) -> list[CeilingLine]:
    """Return the ceilings of a run: measured, datasheet, links, a disagreeing weight-read bandwidth and caches.

    Empty without a memory ceiling and a compute ceiling.
    """
    ceilings, device = run.document.ceilings, run.document.device
    of_dtype, bandwidth = own_ceiling(ceilings, run.model.dtype), ceilings.memory_bytes_per_s
    if of_dtype is None or bandwidth is None:
        return []
    dtype, ceiling = of_dtype
    peak = ceiling.per_s
    how = "measured" if ceilings.ceilings.measured(dtype) else "not all measured"
    label = f"{how}: {scaled(bandwidth, 'B/s')}, {scaled(peak, 'FLOP/s')} {dtype}"
    lines = [CeilingLine("measured", label, bandwidth, peak)]
    if burst := ceilings.full_clock.get(dtype):
        label = f"until the power limit: {scaled(burst, 'FLOP/s')} {dtype}"
        lines.append(CeilingLine("other", label, bandwidth, burst, from_intensity=burst / bandwidth))
    others = [(name, other.per_s) for name, other in ceilings.compute.items() if name != dtype]
    for name, value in sorted(others, key=lambda item: -item[1]):
        label = f"measured: {scaled(value, 'FLOP/s')} {name}"
        lines.append(CeilingLine("other", label, bandwidth, value, from_intensity=value / bandwidth))
    if device.datasheet_flops_per_s and device.datasheet_bytes_per_s:
        sheet = device.datasheet_bytes_per_s, device.datasheet_flops_per_s
        label = f"datasheet (dense): {scaled(sheet[0], 'B/s')}, {scaled(sheet[1], 'FLOP/s')}"
        lines.append(CeilingLine("datasheet", label, *sheet))
    for where, link in ceilings.links.items():
        lines.append(_slope("link", f"from the {where}: {scaled(link.per_s, 'B/s')}", link.per_s, peak))
    if ceilings.weights and (share := weight_read_share(ceilings.ceilings)) != 1.0:
        weights_per_s = share * ceilings.ceilings.memory_bytes_per_s_for(ceilings.weights.nbytes)
        lines.append(_slope("other", f"the model's own weights: {scaled(weights_per_s, 'B/s')}", weights_per_s, peak))
    for level in cache_levels(ceilings):
        label = f"a cache, at {level.nbytes >> 20} MiB: {scaled(level.bytes_per_s, 'B/s')}"
        lines.append(_slope("cache", label, level.bytes_per_s, peak))
    return lines


def _slope(kind: CeilingKind, label: str, bytes_per_s: float, flops_per_s: float) -> CeilingLine:
    """Return a ceiling drawn only up to the plateau, which another line already shows."""
    return CeilingLine(kind, label, bytes_per_s, flops_per_s, to_intensity=flops_per_s / bytes_per_s)


def own_ceiling(ceilings: CeilingsRecord, dtype: str) -> tuple[str, Ceiling] | None:
    """Return the name and the compute ceiling of a dtype, or of the dtype with the highest measured ceiling."""
    ceiling = ceilings.compute_ceiling(dtype)
    return next(((name, other) for name, other in ceilings.compute.items() if other is ceiling), None)


def cache_levels(ceilings: CeilingsRecord) -> list[CurvePoint]:
    """Return the fastest point of the curve and the largest one served by a cache; empty if no size is faster."""
    memory = ceilings.ceilings.memory_bytes_per_s
    cached = [point for point in ceilings.curve if point.bytes_per_s > RESIDENT_GAIN * memory]
    fastest = sorted(cached, key=lambda point: -point.bytes_per_s)[:1]
    return list(dict.fromkeys([*fastest, *cached[-1:]]))


def point_words(result: CellResult) -> str:
    """Return what a point of a roofline says about its cell."""
    judged = f", {percent(result.attained)} of the roofline, {result.regime}" if result.regime else ""
    return (
        f"{result.key.name}: {duration(result.latency_s)}, {significant(result.tokens_per_s)} tokens/s,"
        f" {significant(result.intensity)} FLOP/byte, {scaled(result.flops_per_s, 'FLOP/s')}{judged}"
    )


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

    Empty for a run without replays. Raises RunError if operators.csv is damaged.
    """
    if not (run.folder / OPERATORS_FILE).exists():
        return {}
    cells = {cell.key: cell for cell in selected_cells(run)}
    sums: dict[CellResult, dict[str, list[float]]] = {}
    for key, item, replayed_s in operator_rows(run.folder):
        if key in cells and item.flops and replayed_s:
            amounts = sums.setdefault(cells[key], {}).setdefault(item.group, [0.0, 0.0, 0.0])
            amounts[0] += float(item.flops)
            amounts[1] += float(item.model_bytes)
            amounts[2] += replayed_s
    return {cell: [GroupPoint(group, *amounts) for group, amounts in groups.items()] for cell, groups in sums.items()}
