"""Rooflines: achieved FLOP/s over arithmetic intensity, of a run, and of a step's operators."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from matplotlib.transforms import Bbox

from profiler.errors import RequestError
from profiler.grid.cells import Phase
from profiler.judge.cells import CellResult
from profiler.report.plots.style import PHASE_COLOR, PHASE_MARKER, REGIME_COLOR, Dashes, panel_grid, title
from profiler.report.roofline_data import CeilingKind, CeilingLine, ceiling_lines, group_points
from profiler.report.selection import cell_words, selected_cells
from profiler.store.folder import Run
from profiler.units import percent, scaled, significant

INK = "#222222"
_SHEET_COLOR = "#888888"
_MARGIN = 3.0
_FONT_POINTS = 9.0
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
    Arrows lead from the points of `selected_cells` to their ceilings.
    """
    figure, [axes] = panel_grid(1, 11.0, 5.6, title(run))
    lines, points = ceiling_lines(run), run.measured
    ridges = [line.ridge for line in lines if line.kind in ("measured", "datasheet", "cache")]
    ys = [*(point.flops_per_s for point in points), *(line.flops_per_s for line in lines)]
    frame(axes, [*(point.intensity for point in points), *ridges], ys, "achieved speed")
    left = {kind: itertools.cycle(dashes) for kind, (_, _, dashes) in _STROKES.items()}
    for number, line in enumerate(lines):
        color, width, _ = _STROKES[line.kind]
        plot_ceiling(axes, line, color=color, lw=width, ls=next(left[line.kind]), gid=f"ceiling-{number}")
    if lines:
        shade(axes, lines[0].ridge)
        draw_ridge(axes, lines[0])
    _draw_points(axes, points)
    figure.draw_without_rendering()  # names need the places of lines and points
    selected = selected_cells(run)
    taken = [_covered(axes, point, with_arrow=point in selected) for point in points]
    _name_lines(axes, lines, taken)
    for cell in selected:
        _draw_arrow(axes, cell)
    name_points(axes, [(cell.intensity, cell.flops_per_s, cell_words(cell)) for cell in selected], taken)
    return figure


def shade(axes: Axes, ridge: float) -> None:
    """Shade and name the intensities where memory limits, and those where compute does."""
    low, high = axes.get_xlim()
    for start, end, limit in ((low, ridge, "memory"), (ridge, high, "compute")):
        axes.axvspan(start, end, color=REGIME_COLOR[f"{limit}-bound"], alpha=0.12, lw=0)
    style: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": _FONT_POINTS}
    axes.annotate("memory-bound", (0, 1), (6, -6), va="top", **style)
    axes.annotate("compute-bound", (1, 0), (-6, 6), ha="right", **style)


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
    style: Any = {"textcoords": "offset points", "fontsize": _FONT_POINTS, "rotation": 90, "ha": "right"}
    axes.annotate(f"ridge {ceiling.ridge:.3g} FLOP/byte", at, xytext=(-3, 8), **style)


def _draw_points(axes: Axes, points: Sequence[CellResult]) -> None:
    series: dict[tuple[Phase, str, int], list[CellResult]] = {}
    for number, point in enumerate(points):
        phase, cell = point.key.phase, point.key.cell
        style: Any = {"color": PHASE_COLOR[phase], "marker": PHASE_MARKER[phase], "gid": f"cell-{number}"}
        axes.plot([point.intensity], [point.flops_per_s], ms=7, mew=0.6, mec="white", ls="", **style)
        series.setdefault((phase, cell.engine, cell.depth), []).append(point)
    for (phase, _, _), line in series.items():
        of_line = sorted(line, key=lambda point: point.key.cell.batch_size)
        places = [point.intensity for point in of_line], [point.flops_per_s for point in of_line]
        axes.plot(*places, color=PHASE_COLOR[phase], lw=0.8)


def _covered(axes: Axes, cell: CellResult, *, with_arrow: bool) -> Bbox:
    top = cell.flops_per_s / (cell.attained if with_arrow and cell.attained < 1 else 1)
    (x, y0), (_, y1) = axes.transData.transform([(cell.intensity, cell.flops_per_s), (cell.intensity, top)])
    return Bbox.from_extents(x - 5, y0 - 5, x + 5, y1 + 5)


def _draw_arrow(axes: Axes, cell: CellResult) -> None:
    if cell.attained < 1:
        x, y = cell.intensity, cell.flops_per_s
        style: Any = {"arrowstyle": "->", "color": PHASE_COLOR[cell.key.phase], "shrinkA": 4, "shrinkB": 0}
        axes.annotate("", (x, y / cell.attained), (x, y), arrowprops=style)
        sides = [(5, 0, "left", "center"), (-5, 0, "right", "center")]
        _write(axes, percent(cell.attained), (x, y / math.sqrt(cell.attained)), sides)


_AROUND = [(x, y, side, "bottom" if y > 0 else "top") for y in (-6, 6, -18) for x, side in ((6, "left"), (-6, "right"))]
"""Where a point's name may be: its offset in points, and its sides."""
_LINE_POINTS = 12.0


def name_points(axes: Axes, named: Sequence[tuple[float, float, str]], taken: Sequence[Bbox] = ()) -> None:
    """Write names of points (intensity, FLOP/s, name) where they hide no text and nothing of `taken`, or not at all.

    The figure has its layout.
    """
    for intensity, flops_per_s, name in named:
        _write(axes, name, (intensity, flops_per_s), _AROUND, taken)


def _write(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    places: Sequence[tuple[float, float, str, str]],
    taken: Sequence[Bbox] = (),
    **style: Any,
) -> bool:
    """Write a text at the first of some places around a point where it is inside the axes, and hides nothing."""
    boxes = [*taken, *(other.get_window_extent() for other in axes.texts if other.get_text())]
    inside = axes.get_window_extent()
    chip = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
    for x, y, ha, va in places:
        look: Any = {"textcoords": "offset points", "fontsize": _FONT_POINTS, "ha": ha, "va": va, "bbox": chip}
        written = axes.annotate(text, at, (x, y), **look, **style)
        box = written.get_window_extent()
        if box.x0 > inside.x0 and box.x1 < inside.x1 and box.y0 > inside.y0 and not box.count_overlaps(boxes):
            return True
        written.remove()
    return False


def _name_lines(axes: Axes, lines: Sequence[CeilingLine], taken: Sequence[Bbox]) -> None:
    """Write the names of plateaus at their right ends, each above the one below, and those of slopes along them."""
    (low, high), bottom, free = axes.get_xlim(), axes.get_ylim()[0], -math.inf
    for line in sorted((line for line in lines if line.has_plateau), key=lambda line: line.flops_per_s):
        y = axes.transData.transform((high, line.flops_per_s))[1] * 72 / axes.figure.dpi
        above = max(2.0, free - y)
        free = y + above + _LINE_POINTS
        name = line.plateau_name if line.kind == "measured" else f"{line.plateau_name} {line.what}"
        _write(axes, name, (high, line.flops_per_s), [(-4, above, "right", "bottom")])
    (x0, y0), (x1, y1) = axes.transData.transform([(1.0, 1.0), (10.0, 10.0)])
    style: Any = {"rotation": math.degrees(math.atan2(y1 - y0, x1 - x0)), "rotation_mode": "anchor"}
    for line in (line for line in lines if line.has_slope and line.kind != "datasheet"):
        name, start = line.slope_name if line.kind == "measured" else line.label, max(low, bottom / line.bytes_per_s)
        for share in (0.15, 0.3, 0.45, 0.6, 0.75):
            x = start * (min(high, line.ridge) / start) ** share
            if _write(axes, name, (x, line.at(x)), [(0, -3, "left", "top")], taken, **style):
                break


def operators(run: Run) -> Figure:
    """Operator groups against the measured ceiling: one panel per cell, the area of a point is its share of the step.

    Raises RequestError for a run without replayed kernels.
    """
    cells = group_points(run)
    if not cells:
        raise RequestError(f"{run.folder} has no replayed kernels: there is no time per operator to draw.")
    ceiling = ceiling_lines(run)[0]
    figure, panels = panel_grid(len(cells), 5.5, 5.0, f"{title(run)}: area is the share of the step")
    for axes, (cell, points) in zip(panels, cells.items(), strict=True):
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
