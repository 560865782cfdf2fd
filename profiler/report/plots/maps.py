"""Charts with one place per cell: its regime and speed, and its time breakdown."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from profiler.grid.cells import Phase
from profiler.judge.breakdown import TERMS
from profiler.report.blocks import evenly
from profiler.report.plots.style import (
    REGIME_COLOR,
    depth_column,
    depth_label,
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
_FACES = {**REGIME_COLOR, NO_ROOM: "#BBBBBB", "forecast": "white"}
_MOST_BARS_A_PHASE = 12
# Width of the longest regime with its margin, and of an axis with its label.
_WORD_INCHES = 1.05
_AXIS_INCHES = 1.2


def regime_map(run: Run) -> Figure:
    """Return the regime and the tokens/s of every cell over batch and depth, a panel per phase.

    Forecast cells have no regime.
    """
    cells = with_forecasts(run)
    cells["regime"] = cells["regime"].where(cells["status"] == "ok", "forecast")
    cells["regime"] += [f"\n{significant(rate)}/s" for rate in cells["tokens_per_s"]]
    phases = phases_of(cells)
    columns = max(min(cells[depth_column(phase)].nunique(), MOST_SIZES) for phase in phases)
    width = max(6.2, _WORD_INCHES * columns + _AXIS_INCHES)
    figure, panels = panel_grid(1, len(phases), width, 4.6, f"{title(run)}: regimes and tokens/s")
    for axes, phase in zip(panels, phases, strict=True):
        regime_panel(axes, cells[cells["phase"] == phase], phase)
        axes.set_title(phase, fontsize=11)
    return figure


def regime_panel(axes: Axes, cells: pd.DataFrame, phase: Phase) -> None:
    """Draw the regimes of a phase's cells over batch and depth; what follows a line end is no part of a regime."""
    depth = depth_column(phase)
    batches, depths = (evenly(sorted(cells[column].unique()), MOST_SIZES) for column in ("batch_size", depth))
    shown = cells[cells["batch_size"].isin(batches) & cells[depth].isin(depths)]
    texts = shown.pivot_table(index="batch_size", columns=depth, values="regime", aggfunc="first")[::-1]
    codes = texts.map(lambda text: list(_FACES).index(text.partition("\n")[0]), na_action="ignore").astype(float)
    words = texts.map(lambda text: text.replace("-bound", ""), na_action="ignore").fillna("")
    colors = {"cmap": list(_FACES.values()), "vmin": 0, "vmax": len(_FACES) - 1, "cbar": False, "linecolor": "#CCCCCC"}
    sns.heatmap(codes, annot=words, fmt="", annot_kws={"size": 8, "color": "black"}, linewidths=1, ax=axes, **colors)
    axes.tick_params(axis="y", rotation=0)
    axes.set_xlabel(depth_label(phase) + of_all(len(depths), cells[depth].nunique()))
    axes.set_ylabel("batch" + of_all(len(batches), cells["batch_size"].nunique()))


def breakdown_chart(run: Run) -> Figure:
    """Return a bar per cell with the terms of its time, stacked to 100 %; negative terms are left of zero.

    seaborn stacks no negative terms, and its bars have no hatches.
    """
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
