"""Charts of a forecast over the batch size."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from profiler.errors import RequestError
from profiler.grid.cells import PHASES, Phase
from profiler.predict.result import Answer, ForecastCell, MeasuredPoint
from profiler.report.plots.style import LINE_STYLES, PHASE_STYLE, STYLE_FILE, log_axes, panels_in_a_row
from profiler.store.folder import Run
from profiler.store.forecasts import read_forecast

_BAND = 0.18


def forecast_band(answer: Answer) -> Figure:
    """Return forecast times over the batch with the band of nine in ten, for the first and last depth of each phase.

    Measured cells are dots; crosses are their forecasts when they were left out of the fit.
    """
    cells, points = answer.cells, answer.measured
    phases = [phase for phase in PHASES if any(cell.phase == phase for cell in cells)]
    with plt.style.context(STYLE_FILE):
        heading = f"{answer.model} ({answer.precision}) on {answer.on}"
        figure, panels = panels_in_a_row(len(phases), 5.5, 4.4, heading)
        for axes, phase in zip(panels, phases, strict=True):
            _band(axes, phase, cells, points)
    return figure


def of_run(run: Run) -> Figure:
    """Return the picture of a run folder's forecast. Raises RequestError for a folder without one."""
    answer = read_forecast(run.folder)
    if answer is None:
        raise RequestError(f"{run.folder} holds no forecast; `roofscope forecast {run.folder} --keep` makes one.")
    return forecast_band(answer)


def _band(axes: Axes, phase: Phase, cells: Sequence[ForecastCell], points: Sequence[MeasuredPoint]) -> None:
    of_phase = [cell for cell in cells if cell.phase == phase and cell.fits]
    depths = sorted({cell.depth for cell in of_phase})
    chosen = [depths[0], depths[-1]] if len(depths) > 1 else depths
    color = PHASE_STYLE[phase].color
    for depth, style in zip(chosen, LINE_STYLES, strict=False):
        line = sorted((cell for cell in of_phase if cell.depth == depth), key=lambda cell: cell.batch_size)
        batches = [cell.batch_size for cell in line]
        low, high = ([1e3 * getattr(cell, name) for cell in line] for name in ("low_s", "high_s"))
        axes.fill_between(batches, low, high, color=color, alpha=_BAND, lw=0)
        times = [1e3 * cell.latency_s for cell in line]
        axes.plot(batches, times, ls=style.dashes, color=color, label=f"forecast, {depth} tokens, nine in ten")
        measured = [point for point in points if point.phase == phase and point.depth == depth]
        if measured:
            at = [point.batch_size for point in measured]
            axes.plot(at, [1e3 * point.latency_s for point in measured], "o", color="black", ms=5, label="measured")
        held_out = [(point.batch_size, 1e3 * point.unseen_s) for point in measured if point.unseen_s is not None]
        if held_out:
            axes.plot(
                *zip(*held_out, strict=True), "x", color="black", ms=7, mew=1.4, label="forecast before measuring"
            )
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    axes.legend(named.values(), named.keys())
    batches = sorted({cell.batch_size for cell in of_phase})
    log_axes(axes, batches, "batch", f"time of a {phase if phase == 'prefill' else 'decode step'}, ms")
    axes.set_title(phase, fontsize=11)
