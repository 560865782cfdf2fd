"""Rooflines: achieved FLOP/s over arithmetic intensity, of a run, and of a step's operators."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from profiler.errors import RequestError
from profiler.grid.cells import Phase
from profiler.judge.cells import CellResult
from profiler.report.plots.style import PHASE_STYLE, Dashes, panel_grid, title
from profiler.report.roofline_data import CeilingKind, CeilingLine, ceiling_lines, group_points
from profiler.store.folder import Run
from profiler.units import percent, scaled, significant

INK = "#222222"
_SHEET_COLOR = "#888888"
_MARGIN = 3.0
_FONT_POINTS = 9.0
_APART = 1.5
_GROUP_COLORS = {
    "attention": "#CC79A7",
    "attention_proj": "#0072B2",
    "mlp": "#D55E00",
    "experts": "#882255",
    "lm_head": "#009E73",
    "state": "#E69F00",
}
_LARGEST_AREA = 2400.0
"""Points squared of a group that takes the whole step."""


_STROKES: dict[CeilingKind, tuple[str, float, tuple[Dashes, ...]]] = {
    "measured": (INK, 2.0, ("-",)),
    "other": (INK, 1.2, (":", (0, (1, 4)), (0, (3, 3)))),
    "datasheet": (_SHEET_COLOR, 2.0, ("--",)),
    "link": ("#CC79A7", 2.0, ("-.", (0, (8, 2, 1, 2)))),
    "cache": ("#009E73", 1.2, ((0, (1, 2)), (0, (4, 2, 1, 2)))),
}
"""Colour, width and dashes of a kind of line: one per line of this kind, repeated if there are more."""


def roofline(run: Run) -> Figure:
    """Return achieved FLOP/s against arithmetic intensity on log axes, under the measured and the datasheet ceilings.

    The axes contain every point, every plateau, and the ridges of measured ceilings, datasheets and caches. Ceilings
    and points have the ids `ceiling-0`, `cell-0` and so on, in the order of `ceiling_lines` and of the measured cells.
    """
    figure, axes = plt.subplots(figsize=(7.2, 6.2))
    lines, points = ceiling_lines(run), run.measured
    ridges = [line.ridge for line in lines if line.kind in ("measured", "datasheet", "cache")]
    ys = [*(point.flops_per_s for point in points), *(line.flops_per_s for line in lines)]
    frame(axes, [*(point.intensity for point in points), *ridges], ys, "achieved speed")
    left = {kind: itertools.cycle(dashes) for kind, (_, _, dashes) in _STROKES.items()}
    for number, line in enumerate(lines):
        color, width, _ = _STROKES[line.kind]
        style = {"color": color, "lw": width, "ls": next(left[line.kind]), "label": line.label}
        plot_ceiling(axes, line, **style, gid=f"ceiling-{number}")
    if lines:
        draw_ridge(axes, lines[0])
    for phase, look in PHASE_STYLE.items():
        _draw_points(axes, points, phase, look.color, look.marker)
    axes.set_title(title(run))
    # Below the axes, where it hides no point.
    figure.legend(loc="outside lower center", ncols=2, frameon=False, handlelength=3.2)
    return figure


def frame(axes: Axes, xs: Sequence[float], ys: Sequence[float], ylabel: str) -> None:
    """Set logarithmic axes of intensity and FLOP/s that contain all these values with a margin."""
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity, model FLOPs per model byte", ylabel=ylabel)
    axes.set(xlim=(min(xs) / _MARGIN, max(xs) * _MARGIN), ylim=(min(ys) / _MARGIN, max(ys) * _MARGIN))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value, 1)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: scaled(value, "FLOP/s", 1)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())


def plot_ceiling(axes: Axes, line: CeilingLine, **style: Any) -> None:
    """Draw a ceiling from end to end of the axes."""
    corners = line.corners(*axes.get_xlim())
    axes.plot([x for x, _ in corners], [y for _, y in corners], **style)


def draw_ridge(axes: Axes, ceiling: CeilingLine) -> None:
    """Mark and name the intensity at which a ceiling bends."""
    axes.axvline(ceiling.ridge, color=INK, lw=0.8, ls=":", ymax=0.97)
    at = (ceiling.ridge, axes.get_ylim()[0])
    style: Any = {"textcoords": "offset points", "fontsize": _FONT_POINTS, "rotation": 90, "va": "bottom"}
    axes.annotate(f"ridge {ceiling.ridge:.3g} FLOP/byte", at, xytext=(5, 8), **style)


def _draw_points(axes: Axes, points: Sequence[CellResult], phase: Phase, color: str, marker: str) -> None:
    """Draw a phase's cells. A line joins those of one depth and engine."""
    numbered = [(number, point) for number, point in enumerate(points) if point.key.phase == phase]
    if not numbered:
        return
    axes.plot([], [], color=color, marker=marker, ls="-", label=phase)
    series: dict[tuple[str, int], list[CellResult]] = {}
    for _, point in numbered:
        series.setdefault((point.key.cell.engine, point.key.cell.depth), []).append(point)
    for line in series.values():
        of_line = sorted(line, key=lambda point: point.key.cell.batch_size)
        places = [point.intensity for point in of_line], [point.flops_per_s for point in of_line]
        axes.plot(*places, color=color, lw=1, alpha=0.6)
    for number, point in numbered:
        at = [point.intensity], [point.flops_per_s]
        axes.plot(*at, color=color, marker=marker, ms=6, mew=0.6, mec="white", ls="", gid=f"cell-{number}")
    name_ends(axes, [(point.flops_per_s, point.intensity, point.key.cell.name) for _, point in numbered], color)


def name_ends(axes: Axes, points: Sequence[tuple[float, float, str]], color: str) -> None:
    """Name the slowest and, if its name has room, the fastest of some points (FLOP/s, intensity, name).

    Names stand at the right below their points, where the ceiling is not.
    """
    slowest, fastest = min(points), max(points)
    for flops_per_s, intensity, name in [slowest, fastest] if fastest[0] > _APART * slowest[0] else [slowest]:
        style: Any = {"textcoords": "offset points", "fontsize": _FONT_POINTS, "color": color}
        axes.annotate(name, (intensity, flops_per_s), xytext=(4, -14), **style)


def operators(run: Run) -> Figure:
    """Operator groups against the measured ceiling: one panel per cell, the area of a point is its share of the step.

    Raises RequestError for a run without replayed kernels.
    """
    cells = group_points(run)
    if not cells:
        raise RequestError(f"{run.folder} has no replayed kernels: there is no time per operator to draw.")
    ceiling = ceiling_lines(run)[0]
    figure, panels = panel_grid(
        -(-len(cells) // 2), min(2, len(cells)), 6.6, 5.0, f"{title(run)}: area is the share of the step"
    )
    for axes in panels[len(cells) :]:
        axes.set_visible(False)
    for axes, (cell, points) in zip(panels, cells.items(), strict=False):
        ys = [ceiling.flops_per_s, *(point.flops_per_s for point in points)]
        frame(axes, [ceiling.ridge, *(point.intensity for point in points)], ys, "achieved speed")
        plot_ceiling(axes, ceiling, color=INK, lw=2)
        for point in points:
            share, attained = point.seconds / cell.latency_s, point.flops_per_s / ceiling.at(point.intensity)
            color, area = _GROUP_COLORS.get(point.group, _SHEET_COLOR), max(20.0, _LARGEST_AREA * share)
            axes.scatter(point.intensity, point.flops_per_s, s=area, color=color, alpha=0.6, ec="black", lw=0.6)
            label = f"{point.group.replace('_', ' ')}: {percent(share)}, {percent(attained)}"
            axes.plot([], [], "o", color=color, label=label)
        placed = sum(point.seconds for point in points) / cell.latency_s
        axes.legend(loc="lower right", fontsize=9, title="share of the step, of the ceiling", title_fontsize=9)
        axes.set_title(f"{cell.key.name}: {percent(placed)} of its time in these kernels", fontsize=11)
    return figure
