"""The roofline: achieved FLOP/s over arithmetic intensity, under every measured roof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from matplotlib.transforms import Bbox

from profiler.grid.cells import Phase
from profiler.report.plots.labels import FONT_POINTS, PointLabel, at_points, markers, text_points, write_labels
from profiler.report.plots.style import LINE_STYLES, PHASE_STYLE, Dashes, PhaseStyle, distinct_names, title
from profiler.report.roofline_data import CellPoint, RoofKind, RoofLine, cell_points, roof_lines
from profiler.store.folder import Run
from profiler.units import scaled, significant

_INK = "#222222"
_SHEET_COLOR = "#888888"
_MARGIN = 3.0


@dataclass(frozen=True)
class _Stroke:
    color: str
    dashes: tuple[Dashes, ...]
    """One per line of this kind, repeated if there are more lines."""
    width: float


_STROKES: dict[RoofKind, _Stroke] = {
    "measured": _Stroke(_INK, ("-",), 2.0),
    "other": _Stroke(_INK, (":", (0, (1, 4)), (0, (3, 3))), 1.2),
    "datasheet": _Stroke(_SHEET_COLOR, ("--",), 2.0),
    "link": _Stroke("#CC79A7", ("-.", (0, (8, 2, 1, 2))), 2.0),
    "cache": _Stroke("#009E73", ((0, (1, 2)), (0, (4, 2, 1, 2))), 1.2),
}


@dataclass(frozen=True)
class _Limits:
    x: tuple[float, float]
    y: tuple[float, float]


def roofline(run: Run) -> Figure:
    """Return achieved FLOP/s against arithmetic intensity on log axes, under the measured and the datasheet roofs.

    Roofs and points have the ids `roof-0`, `cell-0` and so on, in the order of `roof_lines` and `cell_points`.
    """
    figure, axes = plt.subplots(figsize=(7.2, 6.2))
    lines, points = roof_lines(run), cell_points(run)
    limits = _frame(axes, lines, points)
    _draw_roofs(axes, lines, limits)
    if lines:
        _draw_ridge(axes, lines[0], limits)
    for phase, style in PHASE_STYLE.items():
        _draw_points(axes, points, phase, style)
    axes.set_title(title(run))
    _legend(figure)
    figure.draw_without_rendering()  # names are placed in the final layout
    taken = [*markers(axes, _places(points)), *(_ridge_box(axes, line.ridge) for line in lines[:1])]
    for phase, style in PHASE_STYLE.items():
        write_labels(axes, _ends(points, phase, style.color), taken)
    return figure


def _frame(axes: Axes, lines: Sequence[RoofLine], points: Sequence[CellPoint]) -> _Limits:
    """Set axes that contain every point, every plateau, and the ridges of measured and datasheet roofs."""
    ridges = [line.ridge for line in lines if line.kind in ("measured", "datasheet", "cache")]
    xs = [*(point.intensity for point in points), *ridges]
    ys = [*(point.flops_per_s for point in points), *(line.flops_per_s for line in lines)]
    limits = _Limits((min(xs) / _MARGIN, max(xs) * _MARGIN), (min(ys) / _MARGIN, max(ys) * _MARGIN))
    axes.set(xscale="log", yscale="log", xlim=limits.x, ylim=limits.y)
    axes.set_xlabel("arithmetic intensity, model FLOPs per model byte")
    axes.set_ylabel("achieved speed")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value, 1)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: scaled(value, "FLOP/s", 1)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    return limits


def _draw_roofs(axes: Axes, lines: Sequence[RoofLine], limits: _Limits) -> None:
    counts: dict[RoofKind, int] = {}
    for number, line in enumerate(lines):
        stroke, nth = _STROKES[line.kind], counts.get(line.kind, 0)
        counts[line.kind] = nth + 1
        corners = line.corners(*limits.x)
        axes.plot(
            [x for x, _ in corners],
            [y for _, y in corners],
            color=stroke.color,
            ls=stroke.dashes[nth % len(stroke.dashes)],
            lw=stroke.width,
            label=line.label,
            gid=f"roof-{number}",
        )


def _draw_ridge(axes: Axes, roof: RoofLine, limits: _Limits) -> None:
    axes.axvline(roof.ridge, color=_INK, lw=0.8, ls=":", ymax=0.97)
    axes.annotate(
        _ridge_name(roof.ridge),
        (roof.ridge, limits.y[0]),
        xytext=(5, 8),
        textcoords="offset points",
        fontsize=FONT_POINTS,
        rotation=90,
        va="bottom",
    )


def _draw_points(axes: Axes, points: Sequence[CellPoint], phase: Phase, style: PhaseStyle) -> None:
    """Draw a phase's cells. A line joins those of one depth and engine."""
    numbered = [(number, point) for number, point in enumerate(points) if point.key.phase == phase]
    if not numbered:
        return
    axes.plot([], [], color=style.color, marker=style.marker, ls="-", label=phase)
    series: dict[tuple[str, int], list[CellPoint]] = {}
    for _, point in numbered:
        series.setdefault((point.key.cell.engine, point.key.cell.depth), []).append(point)
    for line in series.values():
        line.sort(key=lambda point: point.key.cell.batch_size)
        xs, ys = [point.intensity for point in line], [point.flops_per_s for point in line]
        axes.plot(xs, ys, color=style.color, lw=1, alpha=0.6)
    for number, point in numbered:
        at = [point.intensity], [point.flops_per_s]
        axes.plot(*at, color=style.color, marker=style.marker, ms=6, mew=0.6, mec="white", ls="", gid=f"cell-{number}")


def _ridge_name(ridge: float) -> str:
    return f"ridge {ridge:.3g} FLOP/byte"


def _ridge_box(axes: Axes, ridge: float) -> Bbox:
    """The place of the ridge's name."""
    x, y = at_points(axes, ridge, axes.get_ylim()[0])
    return Bbox.from_extents(x, y, x + 1.5 * FONT_POINTS, y + text_points(_ridge_name(ridge)))


def _places(points: Sequence[CellPoint]) -> list[tuple[float, float]]:
    return [(point.intensity, point.flops_per_s) for point in points]


def _ends(points: Sequence[CellPoint], phase: Phase, color: str) -> list[PointLabel]:
    """The names of a phase's slowest and fastest cell."""
    ranked = sorted((point for point in points if point.key.phase == phase), key=lambda point: point.flops_per_s)
    ends = dict.fromkeys((*ranked[:1], *ranked[-1:]))  # of a single cell, only one
    return [PointLabel(point.key.cell.name, point.intensity, point.flops_per_s, color) for point in ends]


def _legend(figure: Figure) -> None:
    """Draw the legend below the axes, where it hides no point."""
    figure.legend(loc="outside lower center", ncols=2, frameon=False, handlelength=3.2)


def devices(runs: Sequence[Run]) -> Figure:
    """Return several runs' cells in one roofline, each run under its own measured roof."""
    figure, axes = plt.subplots(figsize=(10, 6.4))
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    roofs = [roof_lines(run)[0] for run in runs]
    points = [cell_points(run) for run in runs]
    limits = _frame(axes, roofs, [point for of_run in points for point in of_run])
    names = distinct_names(runs, [title(run) for run in runs])
    for index, (name, roof, of_run) in enumerate(zip(names, roofs, points, strict=True)):
        color, style = colors[index % len(colors)], LINE_STYLES[index % len(LINE_STYLES)]
        label = f"{name}: {scaled(roof.bytes_per_s, 'B/s')}, {scaled(roof.flops_per_s, 'FLOP/s')}"
        corners = roof.corners(*limits.x)
        axes.plot([x for x, _ in corners], [y for _, y in corners], color=color, ls=style.dashes, lw=2, label=label)
        for phase, shape in PHASE_STYLE.items():
            mine = [point for point in of_run if point.key.phase == phase]
            xs, ys = [point.intensity for point in mine], [point.flops_per_s for point in mine]
            axes.scatter(xs, ys, color=color, marker=shape.marker, s=30)
    for phase, shape in PHASE_STYLE.items():
        axes.plot([], [], color=_SHEET_COLOR, marker=shape.marker, ls="", label=phase)
    axes.set_title("measured roofs and the cells under them")
    _legend(figure)
    figure.draw_without_rendering()  # names are placed in the final layout
    taken = markers(axes, [place for of_run in points for place in _places(of_run)])
    for index, of_run in enumerate(points):
        for phase in PHASE_STYLE:
            write_labels(axes, _ends(of_run, phase, colors[index % len(colors)]), taken)
    return figure
