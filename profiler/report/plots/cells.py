"""Pictures with a place for every cell: its regime, its intensity, its split."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from profiler.diagnosis.step_time import TERM_NAMES
from profiler.record.run import Run
from profiler.report.plots.style import (
    PHASE_STYLE,
    REGIME_COLOR,
    TERM_STYLE,
    cell_name,
    depth_column,
    first_engine,
    title,
)
from profiler.units import significant

_MOST_BARS = 24


def regime_map(run: Run) -> Figure:
    """The regime of every cell over batch and depth, one panel a phase; lines where it changes."""
    cells = first_engine(run)
    phases = [phase for phase in PHASE_STYLE if (cells["phase"] == phase).any()]
    figure, panels = plt.subplots(1, len(phases), figsize=(6.2 * len(phases), 4.6), squeeze=False)
    for axes, phase in zip(panels[0], phases, strict=True):
        depth = depth_column(phase)
        table = cells[cells["phase"] == phase].pivot_table(
            index="batch_size", columns=depth, values="regime", aggfunc="first"
        )
        _map_panel(axes, table)
        axes.set_title(phase, fontsize=11)
        axes.set_xlabel("prompt tokens" if phase == "prefill" else "cached tokens")
        axes.set_ylabel("batch")
    figure.suptitle(title(run), x=0.01, ha="left", fontsize=12)
    return figure


def _map_panel(axes: Axes, table: pd.DataFrame) -> None:
    rows, columns = table.shape
    for row in range(rows):
        for column in range(columns):
            regime = table.iat[row, column]
            if not isinstance(regime, str):
                continue
            axes.add_patch(Rectangle((column, row), 1, 1, color=REGIME_COLOR[regime], ec="white", lw=1))
            axes.text(column + 0.5, row + 0.5, regime.replace("-bound", ""), ha="center", va="center", fontsize=8)
            for other, line in (
                ((row, column + 1), ((column + 1,) * 2, (row, row + 1))),
                ((row + 1, column), ((column, column + 1), (row + 1,) * 2)),
            ):
                inside = other[0] < rows and other[1] < columns
                if inside and table.iat[other] != regime:
                    axes.plot(*line, color="black", lw=2)
    axes.set(xlim=(0, columns), ylim=(0, rows))
    axes.set_xticks([column + 0.5 for column in range(columns)], [str(value) for value in table.columns])
    axes.set_yticks([row + 0.5 for row in range(rows)], [str(value) for value in table.index])
    axes.grid(visible=False)


def step_split(run: Run) -> Figure:
    """Every cell's time as its terms, stacked to a whole; a negative term lies left of zero."""
    cells = first_engine(run)
    if len(cells) > _MOST_BARS:
        cells = cells.iloc[np.linspace(0, len(cells) - 1, _MOST_BARS).round().astype(int)]
    bars_in = 0.34 * len(cells)
    figure, axes = plt.subplots(figsize=(10, 1.6 + bars_in))
    names = [cell_name(row) for row in cells.to_dict("records")]
    left, right = np.zeros(len(cells)), np.zeros(len(cells))
    for column, (color, hatch) in TERM_STYLE.items():
        share = 100 * (cells[column] / cells["latency_s"]).to_numpy(dtype=float)
        start = np.where(share >= 0, right, left + share)
        axes.barh(
            names, np.abs(share), left=start, color=color, hatch=hatch, ec="white", lw=0.4, label=TERM_NAMES[column]
        )
        right, left = right + np.maximum(share, 0), left + np.minimum(share, 0)
    axes.axvline(100, color="black", lw=1)
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.set_xlabel("share of the measured time, %")
    axes.set_title(title(run))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.6 / bars_in), ncols=4, frameon=False)
    return figure


def intensity_map(run: Run) -> Figure:
    """Arithmetic intensity over batch and depth, with the regime of each cell, one panel a phase."""
    cells = first_engine(run)
    phases = [phase for phase in PHASE_STYLE if (cells["phase"] == phase).any()]
    figure, panels = plt.subplots(1, len(phases), figsize=(6.6 * len(phases), 4.8), squeeze=False)
    norm = LogNorm(cells["intensity"].min(), max(cells["intensity"].max(), 1.01 * cells["intensity"].min()))
    for axes, phase in zip(panels[0], phases, strict=True):
        of_phase = cells[cells["phase"] == phase]
        depth = depth_column(phase)
        intensity = of_phase.pivot_table(index="batch_size", columns=depth, values="intensity")
        regime = of_phase.pivot_table(index="batch_size", columns=depth, values="regime", aggfunc="first")
        values = intensity.to_numpy(dtype=float)
        image = axes.imshow(values, norm=norm, cmap="cividis", aspect="auto", origin="lower")
        for row, column in np.ndindex(*values.shape):
            value, name = float(values[row, column]), regime.iat[row, column]
            if np.isnan(value):
                continue
            dark = norm(value) < _DARK
            text = f"{significant(value, 2)}\n{str(name).removesuffix('-bound')}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
        axes.set_xticks(range(intensity.shape[1]), [str(size) for size in intensity.columns])
        axes.set_yticks(range(intensity.shape[0]), [str(size) for size in intensity.index])
        axes.set(title=phase, xlabel="prompt tokens" if phase == "prefill" else "cached tokens", ylabel="batch")
        axes.grid(visible=False)
    figure.colorbar(image, ax=panels[0], label="model FLOPs per model byte")
    figure.suptitle(title(run), x=0.01, ha="left", fontsize=12)
    return figure


# Below this share of the colour scale its colours are dark, and text on them white.
_DARK = 0.55
