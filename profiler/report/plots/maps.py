"""Charts with one place per cell: its regime, its intensity, its time breakdown."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
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
    panel_grid,
    phases_of,
    title,
    with_forecasts,
)
from profiler.report.selection import MOST_SIZES, of_all, of_first_engine
from profiler.report.time_breakdown import breakdown_bars, terms_of
from profiler.store.folder import Run
from profiler.units import significant

NO_ROOM = "no room"
_FORECAST = "forecast"
_FACES = {**REGIME_COLOR, NO_ROOM: "#BBBBBB", _FORECAST: "white"}
_MOST_BARS_A_PHASE = 12
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
    figure, panels = panel_grid(1, len(phases), width, 4.6, title(run))
    for axes, phase in zip(panels, phases, strict=True):
        regime_panel(axes, cells[cells["phase"] == phase], phase)
        axes.set_title(phase, fontsize=11)
    return figure


def regime_panel(axes: Axes, cells: pd.DataFrame, phase: Phase) -> None:
    """Draw the regimes of a phase's cells over batch and depth; what follows a line end is no part of a regime."""
    table = _table(cells, phase, "regime")
    rows, columns = table.shape
    regimes: Any = table.fillna("").to_numpy(dtype=object)
    for row, column in np.ndindex(rows, columns):
        kind = _kind(regimes[row, column])
        if not kind:
            continue
        hatch, edge = ("//", "#E0E0E0") if kind == _FORECAST else ("", "white")
        axes.add_patch(Rectangle((column, row), 1, 1, fc=_FACES[kind], ec=edge, lw=1, hatch=hatch))
        text = regimes[row, column].replace("-bound", "")
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8)
        for other, line in (
            ((row, column + 1), ((column + 1,) * 2, (row, row + 1))),
            ((row + 1, column), ((column, column + 1), (row + 1,) * 2)),
        ):
            inside = other[0] < rows and other[1] < columns
            if inside and _kind(regimes[other]) != kind and _FORECAST not in (kind, _kind(regimes[other])):
                axes.plot(*line, color="black", lw=2)
    axes.set(xlim=(0, columns), ylim=(0, rows))
    _label_sizes(axes, table, cells, phase, 0.5)


def _kind(regime: str) -> str:
    return regime.partition("\n")[0]


def _table(cells: pd.DataFrame, phase: Phase, values: str) -> pd.DataFrame:
    """Return one column of the cells over batch and depth, with at most `MOST_SIZES` of each."""
    depth = depth_column(phase)
    batches, depths = (evenly(sorted(cells[column].unique()), MOST_SIZES) for column in ("batch_size", depth))
    shown = cells[cells["batch_size"].isin(batches) & cells[depth].isin(depths)]
    return shown.pivot_table(index="batch_size", columns=depth, values=values, aggfunc="first")


def _label_sizes(axes: Axes, table: pd.DataFrame, cells: pd.DataFrame, phase: Phase, middle: float) -> None:
    """Label the axes of a map, with the number of sizes if it does not show all."""
    rows, columns = table.shape
    axes.set_xticks(np.arange(columns) + middle, [str(size) for size in table.columns])
    axes.set_yticks(np.arange(rows) + middle, [str(size) for size in table.index])
    axes.set_xlabel(depth_label(phase) + of_all(columns, cells[depth_column(phase)].nunique()))
    axes.set_ylabel("batch" + of_all(rows, cells["batch_size"].nunique()))
    axes.grid(visible=False)


def intensity_map(run: Run) -> Figure:
    """Return the arithmetic intensity over batch and depth, with the regime of each cell, a panel per phase."""
    return intensity_figure(first_engine_frame(run), title(run))


def intensity_figure(cells: pd.DataFrame, heading: str) -> Figure:
    """Return a panel per phase with the `intensity` and the `regime` of its cells."""
    phases = phases_of(cells)
    figure, panels = panel_grid(1, len(phases), 6.6, 4.8, heading)
    least, most = cells["intensity"].min(), cells["intensity"].max()
    wider = max(1.0, (10 * least / most) ** 0.5)  # a decade contains a tick
    norm = LogNorm(least / wider, most * wider)
    for axes, phase in zip(panels, phases, strict=True):
        of_phase = cells[cells["phase"] == phase]
        table = _table(of_phase, phase, "intensity")
        values, regimes = table.to_numpy(dtype=float), _table(of_phase, phase, "regime").astype(str).to_numpy()
        image = axes.imshow(values, norm=norm, cmap="cividis", aspect="auto", origin="lower")
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                text = f"{significant(value, 2)}\n{str(regimes[row, column]).removesuffix('-bound')}".strip()
                color = "white" if norm(value) < _DARK else "black"
                axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
        axes.set_title(phase)
        _label_sizes(axes, table, of_phase, phase, 0.0)
    plain = FuncFormatter(lambda value, _: significant(value, 1))
    bar = figure.colorbar(image, ax=panels, label="model FLOPs per model byte", format=plain)
    bar.set_ticks(LogLocator(subs=(1.0, 2.0, 5.0)))
    bar.minorticks_off()
    return figure


def breakdown_chart(run: Run) -> Figure:
    """Return a bar per cell with the terms of its time, stacked to 100 %; negative terms are left of zero."""
    bars = breakdown_bars(of_first_engine(run), _MOST_BARS_A_PHASE)
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.34 * len(bars)))
    for name in terms_of(bars):
        term = TERMS[name]
        segments = [segment for bar in bars for segment in bar.segments if segment.term == name]
        widths, starts = [100 * abs(item.share) for item in segments], [100 * item.start for item in segments]
        style: Any = {"color": term.color, "hatch": term.hatch, "label": term.name}
        axes.barh(range(len(bars)), widths, left=starts, ec="white", lw=0.4, **style)
    axes.axvline(100, color="black", lw=1)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlabel("share of the measured time, %")
    axes.set_title(title(run))
    axes_in = axes.get_position().height * figure.get_figheight()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.6 / axes_in), ncols=4, frameon=False)
    return figure
