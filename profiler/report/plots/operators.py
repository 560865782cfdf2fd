"""The operator groups of a step under the measured roof."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from profiler.errors import RequestError
from profiler.judge.cells import CellResult
from profiler.report.plots.style import title
from profiler.report.roofline_data import GroupPoint, RoofLine, group_points, roof_lines
from profiler.store.folder import Run
from profiler.units import percent, scaled, significant

_COLORS = {
    "attention": "#CC79A7",
    "attention_proj": "#0072B2",
    "mlp": "#D55E00",
    "experts": "#882255",
    "lm_head": "#009E73",
    "state": "#E69F00",
}
_OTHER = "#888888"
_LARGEST_AREA = 2400.0
"""Points squared of a group that takes the whole step."""
_MARGIN = 4.0


def operator_roofline(run: Run) -> Figure:
    """Operator groups against the measured roof: one panel per cell, the area of a point is its share of the step.

    Raises RequestError for a run without replayed kernels.
    """
    cells = group_points(run)
    if not cells:
        raise RequestError(f"{run.folder} has no replayed kernels: there is no time per operator to draw.")
    roof = roof_lines(run)[0]
    columns = min(2, len(cells))
    rows = -(-len(cells) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(6.6 * columns, 0.6 + 5.0 * rows), squeeze=False)
    for axes, (cell, points) in zip(panels.flat, cells.items(), strict=False):
        _panel(axes, cell, points, roof)
    for axes in list(panels.flat)[len(cells) :]:
        axes.set_visible(False)
    figure.suptitle(f"{title(run)}: area is the share of the step", x=0.01, ha="left", fontsize=12)
    return figure


def _panel(axes: Axes, cell: CellResult, points: list[GroupPoint], roof: RoofLine) -> None:
    xs = [roof.ridge, *(point.intensity for point in points)]
    ys = [roof.flops_per_s, *(point.flops_per_s for point in points)]
    low, high = min(xs) / _MARGIN, max(xs) * _MARGIN
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(ys) / _MARGIN, max(ys) * _MARGIN))
    corners = roof.corners(low, high)
    axes.plot([x for x, _ in corners], [y for _, y in corners], color="#222222", lw=2)
    for point in points:
        share = point.seconds / cell.latency_s
        color = _COLORS.get(point.group, _OTHER)
        at = point.intensity, point.flops_per_s
        area = max(20.0, _LARGEST_AREA * share)
        axes.scatter(*at, s=area, color=color, alpha=0.6, ec="black", lw=0.6)
        attained = point.flops_per_s / roof.at(point.intensity)
        label = f"{point.group.replace('_', ' ')}: {percent(share)}, {percent(attained)}"
        axes.plot([], [], "o", color=color, label=label)
    placed = sum(point.seconds for point in points) / cell.latency_s
    axes.legend(loc="lower right", fontsize=8, title="share of the step, of the roof", title_fontsize=8)
    axes.set_title(f"{cell.key.name}: {percent(placed)} of its time in these kernels", fontsize=11)
    axes.set(xlabel="arithmetic intensity, model FLOPs per model byte", ylabel="achieved FLOP/s")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value, 1)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: scaled(value, "", 1)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
