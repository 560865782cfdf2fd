"""What a model costs on rented GPUs over the load, as a picture."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from profiler.errors import RequestError
from profiler.predict.costs import CostOverLoad
from profiler.report.plots.style import LINE_STYLES, STYLE_FILE, log_axes
from profiler.store.folder import Run
from profiler.store.forecasts import read_costs


def cost_figure(costs: CostOverLoad) -> Figure:
    """Return USD per million output tokens over the sequences in flight, a line per GPU.

    Marks show where a GPU becomes cheaper than its neighbour in price per hour. Raises RequestError if no GPU fits.
    """
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
        legend = ["bands: nine in ten", "marks: the largest batch", *(["+: crossover"] if crossed else [])]
        load = f"{costs.model}, {costs.prompt_len} tokens in, {costs.new_tokens} out"
        axes.set_title(f"{load}\n{', '.join(legend)}", fontsize=10, loc="left")
    return figure


def cost_of_run(run: Run) -> Figure:
    """Return the cost picture of a run folder. Raises RequestError for a folder without costs."""
    costs = read_costs(run.folder)
    if costs is None:
        raise RequestError(f"{run.folder} holds no costs; `roofscope rent MODEL --keep {run.folder}` makes them.")
    return cost_figure(costs)
