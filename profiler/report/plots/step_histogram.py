"""The distribution of all timed decode steps."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from profiler.errors import RequestError
from profiler.facts.visits import steady
from profiler.grid.cells import Cell
from profiler.report.blocks import evenly
from profiler.report.plots.style import LINE_STYLES, title
from profiler.report.selection import first_engine
from profiler.store.folder import Run, read_gathered

_GREY = "#bbbbbb"


def steps(run: Run) -> Figure:
    """Return the cumulative distribution of the timed decode steps of some cells, from the smallest to the largest.

    Times are relative to the cell's median. Raises RequestError for a run without a decode step.
    """
    steps = _steps_of(run)
    if not steps:
        raise RequestError(f"{run.folder} has no decode step: there is nothing to draw.")
    figure, axes = plt.subplots(figsize=(9, 4.8))
    for cell, style in zip(evenly(sorted(steps), len(LINE_STYLES)), LINE_STYLES, strict=False):
        times = np.sort(steps[cell])
        middle = float(np.median(times))
        share = 100 * np.arange(1, len(times) + 1) / len(times)
        label = f"batch {cell.name}: {len(times)} steps, median {1e3 * middle:.3g} ms"
        axes.step(times / middle, share, ls=style.dashes, lw=1.8, where="post", label=label)
    _percentiles(axes)
    axes.set(xlabel="time of a step over the cell's median", ylabel="steps up to this time, %", ylim=(0, 101))
    widest = max(float(np.percentile(times, 99.5) / np.median(times)) for times in steps.values())
    axes.set_xlim(0.9, min(max(widest, 1.15), 3.0))
    axes.legend(loc="lower right")
    axes.set_title(title(run))
    return figure


def _steps_of(run: Run) -> dict[Cell, NDArray[np.float64]]:
    """Return the seconds of the first engine's steady decode steps, by cell."""
    visits = read_gathered(run.folder, run.document).visits
    times = {
        cell: [time_s for visit in of_cell for time_s in steady(visit.decode_s)] for cell, of_cell in visits.items()
    }
    return {cell: np.array(steps_s) for cell, steps_s in times.items() if steps_s and cell.engine == first_engine(run)}


def _percentiles(axes: Axes) -> None:
    for percentile in (50, 90, 99):
        axes.axhline(percentile, color=_GREY, lw=0.8)
        axes.annotate(
            f"p{percentile}",
            (1, percentile),
            xycoords=("axes fraction", "data"),
            xytext=(3, -3),
            textcoords="offset points",
            fontsize=9,
        )
