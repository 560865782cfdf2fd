"""What a model costs on rented GPUs over the load, as a picture."""

from __future__ import annotations

import textwrap

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from profiler.errors import RequestError
from profiler.predict.costs import CostOverLoad
from profiler.report.plots.style import LINE_STYLES, STYLE_FILE
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
        raise RequestError("no GPU fits with a price that is ranked: there is nothing to draw.")
    with plt.style.context(STYLE_FILE):
        figure, axes = plt.subplots(figsize=(8, 5))
        crossed = False
        for line, style in zip(costs.lines, LINE_STYLES, strict=False):
            usd = [span.typical for span in line.usd_per_thousand]
            label = f"{line.name}, {line.usd_per_h:.2f} USD/h"
            [drawn] = axes.plot(line.rates_per_s, usd, ls=style.dashes, label=label)
            low, high = ([getattr(span, end) for span in line.usd_per_thousand] for end in ("low", "high"))
            axes.fill_between(line.rates_per_s, low, high, color=drawn.get_color(), alpha=0.10, lw=0)
            if line.crossover_per_s in line.rates_per_s:
                crossed = True
                place = (line.crossover_per_s, usd[line.rates_per_s.index(line.crossover_per_s)])
                axes.plot(*place, "k+", ms=12, mew=1.6)
                axes.annotate(f"{significant(place[0], 2)}/s", place, xytext=(5, 5), textcoords="offset points")
        if costs.rate_per_s is not None:
            axes.axvline(costs.rate_per_s, color="0.4", lw=0.9, ls=":")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("requests per second")
        axes.set_ylabel("USD per thousand requests")
        axes.legend(fontsize=8)
        legend = [
            "bands: nine in ten",
            "steps: one more GPU",
            *(["+: crossover"] if crossed else []),
            *(["dotted: the requested rate"] if costs.rate_per_s is not None else []),
        ]
        title = textwrap.fill(costs.title, _TITLE_CHARACTERS)
        axes.set_title(f"{title}\n{', '.join(legend)}", fontsize=9, loc="left")
    return figure


def cost_of_run(run: Run) -> Figure:
    """Return the cost picture of a run folder. Raises RequestError for a folder without costs."""
    costs = read_costs(run.folder)
    if costs is None:
        raise RequestError(f"{run.folder} holds no costs; `roofscope rent MODEL --keep {run.folder}` makes them.")
    return cost_figure(costs)
