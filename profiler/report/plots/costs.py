"""What a model costs on rented GPUs over the load, as a picture."""

from __future__ import annotations

import textwrap

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from profiler.errors import RequestError
from profiler.predict.costs import CostOverLoad
from profiler.report.plots.labels import PointLabel, markers, write_labels
from profiler.report.plots.style import LINE_STYLES, STYLE_FILE, log_ticks
from profiler.store.folder import Run
from profiler.store.forecasts import read_costs
from profiler.units import significant

_TITLE_CHARACTERS = 105


def cost_figure(costs: CostOverLoad) -> Figure:
    """Return USD per thousand requests over the requests per second, a line per GPU.

    A line falls while a GPU has idle time, and jumps where another GPU is needed. Marks show where a GPU first costs
    less than the next cheaper one per hour. Raises RequestError if there is no line.
    """
    if not costs.lines:
        raise RequestError("no GPU meets the limits: there is nothing to draw.")
    with plt.style.context(STYLE_FILE):
        figure, axes = plt.subplots(figsize=(8, 5))
        crossovers: list[PointLabel] = []
        for line, style in zip(costs.lines, LINE_STYLES, strict=False):
            usd = [span.typical for span in line.usd_per_thousand]
            label = f"{line.name}, {line.usd_per_h:.2f} USD/h"
            [drawn] = axes.plot(line.rates_per_s, usd, ls=style.dashes, label=label)
            low, high = ([getattr(span, end) for span in line.usd_per_thousand] for end in ("low", "high"))
            axes.fill_between(line.rates_per_s, low, high, color=drawn.get_color(), alpha=0.10, lw=0)
            if line.crossover_per_s in line.rates_per_s:
                place = (line.crossover_per_s, usd[line.rates_per_s.index(line.crossover_per_s)])
                axes.plot(*place, "k+", ms=12, mew=1.6)
                crossovers.append(PointLabel(f"{significant(place[0], 2)}/s", *place, "black"))
        if costs.rate_per_s is not None:
            axes.axvline(costs.rate_per_s, color="0.4", lw=0.9, ls=":")
        axes.set(xscale="log", yscale="log", xlabel="requests per second", ylabel="USD per thousand requests")
        for axis in (axes.xaxis, axes.yaxis):
            log_ticks(axis, lambda value: significant(value, 1))
        axes.legend(fontsize=8)
        legend = [
            "bands: nine in ten",
            "steps: one more GPU",
            *(["+: crossover"] if crossovers else []),
            *(["dotted: the requested rate"] if costs.rate_per_s is not None else []),
        ]
        title = textwrap.fill(costs.title, _TITLE_CHARACTERS)
        axes.set_title(f"{title}\n{', '.join(legend)}", fontsize=9, loc="left")
        figure.draw_without_rendering()  # names are placed in the final layout
        write_labels(axes, crossovers, markers(axes, [(each.x, each.y) for each in crossovers]))
    return figure


def cost_of_run(run: Run) -> Figure:
    """Return the cost picture of a run folder. Raises RequestError for a folder without costs."""
    costs = read_costs(run.folder)
    if costs is None:
        raise RequestError(f"{run.folder} holds no costs; `roofscope rent MODEL --keep {run.folder}` makes them.")
    return cost_figure(costs)
