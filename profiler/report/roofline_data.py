"""Data of a roofline chart: ceilings, cells with their labels, and the operator groups of a step."""

from dataclasses import dataclass
from typing import Literal

from profiler.facts.ceilings import RESIDENT_GAIN
from profiler.judge.cells import CellResult
from profiler.judge.demand import weight_read_share
from profiler.report.selection import selected_cells
from profiler.store.folder import Run
from profiler.store.operators_csv import OPERATORS_FILE, operator_rows
from profiler.units import duration, percent, scaled, significant

CeilingKind = Literal["measured", "other", "datasheet", "link", "cache"]


@dataclass(frozen=True)
class CeilingLine:
    """One ceiling: min(intensity x bandwidth, peak), drawn between two intensities."""

    kind: CeilingKind
    what: str
    """Where it comes from."""
    bytes_per_s: float
    """The slope."""
    flops_per_s: float
    """The plateau."""
    has_slope: bool = True
    has_plateau: bool = True
    dtype: str = ""
    """Of the plateau, if it has a name."""

    @property
    def slope_name(self) -> str:
        return scaled(self.bytes_per_s, "B/s")

    @property
    def plateau_name(self) -> str:
        return f"{scaled(self.flops_per_s, 'FLOP/s')} {self.dtype}".rstrip()

    @property
    def label(self) -> str:
        """Return `measured: 4.39 TB/s, 671 TFLOP/s bfloat16`: what it is, and the figures of the drawn parts."""
        names = [self.slope_name] * self.has_slope + [self.plateau_name] * self.has_plateau
        return f"{self.what}: {', '.join(names)}"

    @property
    def ridge(self) -> float:
        """The intensity at which the slope meets the plateau."""
        return self.flops_per_s / self.bytes_per_s

    def at(self, intensity: float) -> float:
        """Return the FLOP/s limit at an intensity."""
        return min(intensity * self.bytes_per_s, self.flops_per_s)

    def corners(self, low: float, high: float) -> list[tuple[float, float]]:
        """Return (intensity, FLOP/s) of the ends and the bend of the part drawn between two intensities."""
        start = low if self.has_slope else max(low, self.ridge)
        end = high if self.has_plateau else min(high, self.ridge)
        if start >= end:
            return []
        inside = [self.ridge] if start < self.ridge < end else []
        return [(x, self.at(x)) for x in (start, *inside, end)]


def ceiling_lines(run: Run) -> list[CeilingLine]:
    """Return the ceilings of a run: measured, datasheet, links, a disagreeing weight-read bandwidth and caches.

    Empty without a memory ceiling and a compute ceiling.
    """
    ceilings, device = run.document.ceilings, run.document.device
    bandwidth = ceilings.memory_bytes_per_s
    if bandwidth is None or not ceilings.compute:
        return []
    ceiling = ceilings.ceilings.compute_ceiling(run.model.dtype)
    dtype, peak = next(name for name, other in ceilings.compute.items() if other is ceiling), ceiling.per_s
    how = "measured" if ceilings.ceilings.measured(dtype) else "not all measured"
    lines = [CeilingLine("measured", how, bandwidth, peak, dtype=dtype)]
    plateaus = [("until the power limit", burst, dtype)] if (burst := ceilings.full_clock.get(dtype)) else []
    others = [("measured", other.per_s, name) for name, other in ceilings.compute.items() if name != dtype]
    lines += [
        CeilingLine("other", what, bandwidth, per_s, has_slope=False, dtype=name)
        for what, per_s, name in [*plateaus, *sorted(others, key=lambda other: -other[1])]
    ]
    if device.datasheet_flops_per_s and device.datasheet_bytes_per_s:
        sheet = device.datasheet_bytes_per_s, device.datasheet_flops_per_s
        lines.append(CeilingLine("datasheet", "datasheet (dense)", *sheet))
    slopes: list[tuple[CeilingKind, str, float]] = []
    slopes += [("link", f"from the {where}", link.per_s) for where, link in ceilings.links.items()]
    if ceilings.weights and (share := weight_read_share(ceilings.ceilings)) != 1.0:
        weights_per_s = share * ceilings.ceilings.memory_bytes_per_s_for(ceilings.weights.nbytes)
        slopes.append(("other", "the model's own weights", weights_per_s))
    # Of caches, the fastest point of the curve and the largest one that they serve.
    cached = [at for at in ceilings.curve if at.bytes_per_s > RESIDENT_GAIN * ceilings.ceilings.memory_bytes_per_s]
    levels = dict.fromkeys([*sorted(cached, key=lambda at: -at.bytes_per_s)[:1], *cached[-1:]])
    slopes += [("cache", f"a cache, at {at.nbytes >> 20} MiB", at.bytes_per_s) for at in levels]
    return lines + [CeilingLine(*slope, peak, has_plateau=False) for slope in slopes]


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
