"""Pictures of what would happen: forecasts over the batch, and what a token costs over the load."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from profiler.diagnosis.costs import CostOverLoad
from profiler.diagnosis.foretold import Answer, ForecastCell, MeasuredPoint
from profiler.errors import RequestError
from profiler.grid import PHASES, Phase
from profiler.record.forecasts import read_costs, read_forecast
from profiler.record.run import Run
from profiler.report.plots.style import LINE_STYLES, PHASE_STYLE, STYLE_FILE, log_axes

_BAND = 0.18


def forecast_band(answer: Answer) -> Figure:
    """Forecast times over the batch with the band that holds nine in ten; measured cells, and what they were forecast
    to take when they were held out, at the first prompt or context of each phase."""
    cells, points = answer.cells, answer.measured
    phases = [phase for phase in PHASES if any(cell.phase == phase for cell in cells)]
    with plt.style.context(STYLE_FILE):
        figure, panels = plt.subplots(1, len(phases), figsize=(5.5 * len(phases), 4.4), squeeze=False)
        for axes, phase in zip(panels[0], phases, strict=True):
            _band(axes, phase, cells, points)
        figure.suptitle(f"{answer.model} ({answer.precision}) on {answer.on}", x=0.01, ha="left", fontsize=12)
    return figure


def of_run(run: Run) -> Figure:
    """The forecast that a run folder keeps. Raises RequestError for one that keeps none."""
    answer = read_forecast(run.folder)
    if answer is None:
        raise RequestError(f"{run.folder} holds no forecast; `roofscope forecast {run.folder} --keep` makes one.")
    return forecast_band(answer)


def _band(axes: Axes, phase: Phase, cells: Sequence[ForecastCell], points: Sequence[MeasuredPoint]) -> None:
    of_phase = [cell for cell in cells if cell.phase == phase and cell.fits]
    depths = sorted({_depth(cell) for cell in of_phase})
    chosen = [depths[0], depths[-1]] if len(depths) > 1 else depths
    color = PHASE_STYLE[phase].color
    for depth, style in zip(chosen, LINE_STYLES, strict=False):
        line = sorted((cell for cell in of_phase if _depth(cell) == depth), key=lambda cell: cell.batch_size)
        batches = [cell.batch_size for cell in line]
        low, high = ([1e3 * getattr(cell, name) for cell in line] for name in ("low_s", "high_s"))
        axes.fill_between(batches, low, high, color=color, alpha=_BAND, lw=0)
        times = [1e3 * cell.latency_s for cell in line]
        axes.plot(batches, times, ls=style.dashes, color=color, label=f"forecast, {depth} tokens, nine in ten")
        seen = [point for point in points if point.phase == phase and point.depth == depth]
        if seen:
            at = [point.batch_size for point in seen]
            axes.plot(at, [1e3 * point.latency_s for point in seen], "o", color="black", ms=5, label="measured")
        unseen = [point for point in seen if point.unseen_s is not None]
        if unseen:
            at = [point.batch_size for point in unseen]
            guessed = [1e3 * (point.unseen_s or 0.0) for point in unseen]
            axes.plot(at, guessed, "x", color="black", ms=7, mew=1.4, label="forecast without having seen it")
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    axes.legend(named.values(), named.keys())
    batches = sorted({cell.batch_size for cell in of_phase})
    log_axes(axes, batches, "batch", f"time of a {phase if phase == 'prefill' else 'decode step'}, ms")
    axes.set_title(phase, fontsize=11)


def _depth(cell: ForecastCell) -> int:
    return cell.prompt_len or cell.context_len


def cost_figure(costs: CostOverLoad) -> Figure:
    """USD of a million output tokens over the sequences in flight, by card, with the crossovers of neighbours in price
    an hour. Raises RequestError where nothing fits."""
    if not costs.lines:
        raise RequestError("no card fits: there is nothing to draw.")
    with plt.style.context(STYLE_FILE):
        figure, axes = plt.subplots(figsize=(7.5, 4.8))
        for line, style in zip(costs.lines, LINE_STYLES, strict=False):
            usd = [span.typical for span in line.usd_per_million]
            name = f"{line.card}, {'16 bits' if line.precision == 'none' else line.precision}"
            label = f"{name}, {line.usd_per_h:.2f} USD/h"
            [drawn] = axes.plot(line.batches, usd, ls=style.dashes, label=label)
            low, high = ([getattr(span, end) for span in line.usd_per_million] for end in ("low", "high"))
            axes.fill_between(line.batches, low, high, color=drawn.get_color(), alpha=0.10, lw=0)
            axes.plot(line.batches[-1:], usd[-1:], marker=style.marker, color=drawn.get_color(), ms=6)
            if line.crossover_batch in line.batches:
                place = (line.crossover_batch, usd[line.batches.index(line.crossover_batch)])
                axes.plot(*place, "k+", ms=12, mew=1.6)
                axes.annotate(f"{line.crossover_batch}", place, xytext=(5, 5), textcoords="offset points")
        top = max(max(line.batches) for line in costs.lines)
        marks = [2**power for power in range(int(np.log2(top)) + 1)]
        log_axes(axes, marks, "sequences at once", "USD per million output tokens")
        axes.legend(fontsize=8)
        crossed = any(line.crossover_batch in line.batches for line in costs.lines)
        told = ["bands: nine in ten", "marks: the largest batch", *(["+: crossover"] if crossed else [])]
        asked = f"{costs.model}, {costs.prompt_len} tokens in, {costs.new_tokens} out"
        axes.set_title(f"{asked}\n{', '.join(told)}", fontsize=10, loc="left")
    return figure


def cost_of_run(run: Run) -> Figure:
    """The costs that a run folder keeps. Raises RequestError for one that keeps none."""
    costs = read_costs(run.folder)
    if costs is None:
        raise RequestError(f"{run.folder} holds no costs; `roofscope rent MODEL --keep {run.folder}` makes them.")
    return cost_figure(costs)
