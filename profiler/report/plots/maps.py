"""Charts with one place per cell: its regime, its intensity, its time breakdown."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator

from profiler.grid.cells import Phase
from profiler.judge.breakdown import TERMS
from profiler.report.blocks import evenly
from profiler.report.plots.style import (
    REGIME_COLOR,
    depth_column,
    depth_label,
    first_engine_frame,
    panels_in_a_row,
    phases_of,
    title,
    with_forecasts,
)
from profiler.report.selection import MOST_SIZES, of_all, of_first_engine
from profiler.report.time_breakdown import BreakdownBar, breakdown_bars, terms_of
from profiler.store.folder import Run
from profiler.units import significant

_MOST_BARS_A_PHASE = 12
_FORECAST = "forecast"
# Width of the longest regime with its margin, and of an axis with its label.
_WORD_INCHES = 1.05
_AXIS_INCHES = 1.2
# Below this share of the colour scale its colours are dark, and text on them white.
_DARK = 0.55


def regime_map(run: Run) -> Figure:
    """Return the regime of every cell over batch and depth, a panel per phase, with lines where the regime changes.

    Forecast cells have no regime and are hatched.
    """
    cells = with_forecasts(run)
    cells["regime"] = cells["regime"].where(cells["status"] == "ok", _FORECAST)
    phases = phases_of(cells)
    columns = max(min(cells[depth_column(phase)].nunique(), MOST_SIZES) for phase in phases)
    width = max(6.2, _WORD_INCHES * columns + _AXIS_INCHES)
    figure, panels = panels_in_a_row(len(phases), width, 4.6, title(run))
    for axes, phase in zip(panels, phases, strict=True):
        of_phase = cells[cells["phase"] == phase]
        _map_panel(axes, _table(of_phase, depth_column(phase), "regime"))
        axes.set_title(phase, fontsize=11)
        _label_sizes(axes, of_phase, phase)
    return figure


def _table(cells: pd.DataFrame, depth: str, values: str) -> pd.DataFrame:
    """Return one column of the cells over batch and depth, with at most `MOST_SIZES` of each."""
    batches, depths = (evenly(sorted(cells[column].unique()), MOST_SIZES) for column in ("batch_size", depth))
    shown = cells[cells["batch_size"].isin(batches) & cells[depth].isin(depths)]
    return shown.pivot_table(index="batch_size", columns=depth, values=values, aggfunc="first")


def _label_sizes(axes: Axes, cells: pd.DataFrame, phase: Phase) -> None:
    """Label the axes of a map, with the number of sizes if it does not show all."""
    batches, depths = cells["batch_size"].nunique(), cells[depth_column(phase)].nunique()
    axes.set_xlabel(depth_label(phase) + of_all(min(depths, MOST_SIZES), depths))
    axes.set_ylabel("batch" + of_all(min(batches, MOST_SIZES), batches))


def _map_panel(axes: Axes, table: pd.DataFrame) -> None:
    rows, columns = table.shape
    for row in range(rows):
        for column in range(columns):
            regime = table.iat[row, column]
            if not isinstance(regime, str):
                continue
            face, hatch = (REGIME_COLOR[regime], "") if regime != _FORECAST else ("white", "//")
            axes.add_patch(
                Rectangle((column, row), 1, 1, fc=face, ec="#E0E0E0" if hatch else "white", lw=1, hatch=hatch)
            )
            axes.text(column + 0.5, row + 0.5, regime.replace("-bound", ""), ha="center", va="center", fontsize=8)
            for other, line in (
                ((row, column + 1), ((column + 1,) * 2, (row, row + 1))),
                ((row + 1, column), ((column, column + 1), (row + 1,) * 2)),
            ):
                inside = other[0] < rows and other[1] < columns
                if inside and table.iat[other] != regime and _FORECAST not in (regime, table.iat[other]):
                    axes.plot(*line, color="black", lw=2)
    axes.set(xlim=(0, columns), ylim=(0, rows))
    axes.set_xticks([column + 0.5 for column in range(columns)], [str(value) for value in table.columns])
    axes.set_yticks([row + 0.5 for row in range(rows)], [str(value) for value in table.index])
    axes.grid(visible=False)


def breakdown_chart(run: Run) -> Figure:
    """Return a bar per cell with the terms of its time, stacked to 100 %; negative terms are left of zero."""
    bars = breakdown_bars(of_first_engine(run), _MOST_BARS_A_PHASE)
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.34 * len(bars)))
    for term in terms_of(bars):
        _draw_term(axes, bars, term)
    axes.axvline(100, color="black", lw=1)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlabel("share of the measured time, %")
    axes.set_title(title(run))
    axes_in = axes.get_position().height * figure.get_figheight()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.6 / axes_in), ncols=4, frameon=False)
    return figure


def _draw_term(axes: Axes, bars: list[BreakdownBar], term: str) -> None:
    shown = TERMS[term]
    segments = [segment for bar in bars for segment in bar.segments if segment.term == term]
    widths, starts = [100 * abs(item.share) for item in segments], [100 * item.start for item in segments]
    at = range(len(bars))
    axes.barh(at, widths, left=starts, color=shown.color, hatch=shown.hatch, ec="white", lw=0.4, label=shown.name)


def intensity_map(run: Run) -> Figure:
    """Return the arithmetic intensity over batch and depth, with the regime of each cell, a panel per phase."""
    cells = first_engine_frame(run)
    phases = phases_of(cells)
    figure, panels = panels_in_a_row(len(phases), 6.6, 4.8, title(run))
    norm = _at_least_a_decade(cells["intensity"].min(), cells["intensity"].max())
    for axes, phase in zip(panels, phases, strict=True):
        of_phase, depth = cells[cells["phase"] == phase], depth_column(phase)
        image = _intensity_panel(axes, _table(of_phase, depth, "intensity"), _table(of_phase, depth, "regime"), norm)
        axes.set_title(phase)
        _label_sizes(axes, of_phase, phase)
    plain = FuncFormatter(lambda value, _: significant(value, 1))
    bar = figure.colorbar(image, ax=panels, label="model FLOPs per model byte", format=plain)
    bar.set_ticks(LogLocator(subs=(1.0, 2.0, 5.0)))
    bar.minorticks_off()
    return figure


def _at_least_a_decade(least: float, most: float) -> LogNorm:
    """Return a colour scale from `least` to `most`, widened to a decade so that it contains a tick."""
    wider = max(1.0, (10 * least / most) ** 0.5)
    return LogNorm(least / wider, most * wider)


def _intensity_panel(axes: Axes, intensity: pd.DataFrame, regime: pd.DataFrame, norm: LogNorm) -> AxesImage:
    values = intensity.to_numpy(dtype=float)
    image = axes.imshow(values, norm=norm, cmap="cividis", aspect="auto", origin="lower")
    for row, column in np.ndindex(*values.shape):
        value, name = float(values[row, column]), regime.iat[row, column]
        if np.isnan(value):
            continue
        text = f"{significant(value, 2)}\n{str(name).removesuffix('-bound')}"
        color = "white" if norm(value) < _DARK else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(intensity.shape[1]), [str(size) for size in intensity.columns])
    axes.set_yticks(range(intensity.shape[0]), [str(size) for size in intensity.index])
    axes.grid(visible=False)
    return image
