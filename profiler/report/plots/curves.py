"""Charts of one figure over another: throughput, depth, doubling, precisions, the steps' times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from profiler.errors import RequestError
from profiler.facts.visits import steady
from profiler.grid.cells import Phase
from profiler.judge.scaling import DoublingTest
from profiler.report.blocks import evenly
from profiler.report.plots.style import (
    LINE_STYLES,
    LineStyle,
    depth_column,
    depth_label,
    distinct_names,
    first_engine_frame,
    log_axes,
    panel_grid,
    phases_of,
    short,
    title,
    with_forecasts,
)
from profiler.report.selection import first_engine
from profiler.store.folder import Run, read_gathered

_STEP: dict[Phase, str] = {"prefill": "prefill", "decode": "decode step"}


def throughput(run: Run) -> Figure:
    """Return decode tokens/s and the time per step against the batch, a line per depth, with intervals.

    Forecasts are open markers. Raises RequestError for a run without a measured decode.
    """
    cells = with_forecasts(run)
    decode = cells[cells["phase"] == "decode"]
    if not (decode["status"] == "ok").any():
        raise _no_decode(run)
    figure, (rate, time) = panel_grid(1, 2, 5.5, 4.4, title(run) + _forecast_note(decode))
    for depth, line, style in lines(decode, "context_len", "batch_size"):
        _line(rate, line, "batch_size", "tokens_per_s", style, f"{depth} cached tokens")
        _line(time, line, "batch_size", "ms", style, f"{depth} cached tokens")
    batches = sorted(set(decode["batch_size"]))
    log_axes(rate, batches, "batch", "tokens/s")
    log_axes(time, batches, "batch", "time of a decode step, ms")
    rate.legend()
    return figure


def _no_decode(run: Run) -> RequestError:
    return RequestError(f"{run.folder} has no decode step: there is nothing to draw.")


def depth_chart(run: Run) -> Figure:
    """Return the time of a prefill against its prompt and of a decode step against its context, a line per batch.

    Forecasts are open markers.
    """
    cells = with_forecasts(run)
    phases = phases_of(cells)
    figure, panels = panel_grid(1, len(phases), 5.5, 4.4, title(run) + _forecast_note(cells))
    for axes, phase in zip(panels, phases, strict=True):
        of_phase, depth = cells[cells["phase"] == phase], depth_column(phase)
        for batch, line, style in lines(of_phase, "batch_size", depth):
            _line(axes, line, depth, "ms", style, f"batch {batch}")
        log_axes(axes, sorted(set(of_phase[depth])), depth_label(phase), f"time of a {_STEP[phase]}, ms")
        axes.legend()
    return figure


def lines(cells: pd.DataFrame, each: str, over: str) -> Iterator[tuple[int, pd.DataFrame, LineStyle]]:
    """Yield each value of a column with its cells in the order of another one and a style.

    Of many values evenly picked ones are used, one per style.
    """
    values = evenly(sorted({int(value) for value in cells[each]}), len(LINE_STYLES))
    for value, style in zip(values, LINE_STYLES, strict=False):
        yield value, cells[cells[each] == value].sort_values(over), style


def _line(axes: Axes, cells: pd.DataFrame, over: str, figure: str, style: LineStyle, label: str) -> None:
    """Draw a line with a filled marker at each measured cell and an open one at each forecast; times have intervals."""
    at = cells[over]
    if figure == "ms":
        values, low, high = (1e3 * cells[name] for name in ("latency_s", "latency_low_s", "latency_high_s"))
        spread = [values - low, high - values]
        drawn, *_ = axes.errorbar(at, values, yerr=spread, capsize=2, ls=style.dashes, label=label)
    else:
        values = cells[figure]
        [drawn] = axes.plot(at, values, ls=style.dashes, label=label)
    for status, face in (("ok", drawn.get_color()), ("forecast", "white")):
        chosen = cells["status"] == status
        axes.plot(at[chosen], values[chosen], style.marker, ms=5, color=drawn.get_color(), mfc=face)


def _forecast_note(cells: pd.DataFrame) -> str:
    return "; open: forecast" if (cells["status"] == "forecast").any() else ""


def doubling(run: Run) -> Figure:
    """Return the slope of log time against log batch at each doubling, next to those that bytes and FLOPs predict.

    Raises RequestError for a run with a single batch size.
    """
    chosen: dict[str | int, DoublingTest] = {}
    for test in run.document.scaling:
        if test.axis == "batch" and test.fixed.get("engine") == first_engine(run):
            chosen.setdefault(test.fixed["phase"], test)
    if not chosen:
        raise RequestError(f"{run.folder} has one batch size: there is no doubling to draw.")
    figure, panels = panel_grid(1, len(chosen), 5.8, 4.6, title(run))
    for axes, (phase, test) in zip(panels, chosen.items(), strict=True):
        items = test.doublings
        at = np.arange(len(items))
        slope, low, high = (np.array([getattr(item, name) for item in items]) for name in ("slope", "low", "high"))
        spread = [np.maximum(slope - low, 0), np.maximum(high - slope, 0)]
        axes.plot(at, [item.bytes_slope for item in items], "s--", color="#56B4E9", label="if bytes set the time")
        axes.plot(at, [item.flops_slope for item in items], "D:", color="#E69F00", label="if FLOPs set the time")
        axes.errorbar(at, slope, yerr=spread, fmt="o-", color="black", capsize=3, label="measured, with its interval")
        axes.set_xticks(at, [f"{item.smaller} to {item.larger}" for item in items])
        axes.set(xlabel="batch", ylabel="slope of time (0: batch is free, 1: no gain)")
        axes.set_ylim(min(-0.1, low.min() - 0.1), max(1.2, high.max() + 0.1))
        axes.set_title(f"{phase}, {test.fixed['prompt_len'] or test.fixed['context_len']} tokens", fontsize=11)
    panels[0].legend()
    return figure


def precisions(runs: Sequence[Run]) -> Figure:
    """Return tokens/s of several runs of one model against the batch (decode) and the tokens of a prompt (prefill).

    The title has what all runs share; a line's name has its precision and what else differs. Raises RequestError for
    runs of several models.
    """
    if len({(run.model.architecture, run.model.params) for run in runs}) > 1:
        models = " and ".join(dict.fromkeys(run.model.id for run in runs))
        raise RequestError(f"precisions is a picture of one model, not of {models}; `devices` draws several.")
    facts = [(run.model.id, f"on {run.document.device.name}") for run in runs]
    common = [fact for fact in facts[0] if all(fact in others for others in facts)]
    own = [[fact for fact in facts_of_run if fact not in common] for facts_of_run in facts]
    names = [", ".join([run.model.precision, *words]) for run, words in zip(runs, own, strict=True)]
    tables = [first_engine_frame(run) for run in runs]
    phases: list[Phase] = [phase for phase in ("decode", "prefill") if any((t["phase"] == phase).any() for t in tables)]
    figure, panels = panel_grid(1, len(phases), 4.5, 4.0, short(" ".join(common)))
    for axes, phase in zip(panels, phases, strict=True):
        sizes: set[int] = set()
        for label, cells, style in zip(distinct_names(runs, names), tables, LINE_STYLES * len(runs), strict=False):
            line = _shallowest(cells[cells["phase"] == phase], phase)
            sizes |= set(line["size"])
            axes.plot(line["size"], line["tokens_per_s"], marker=style.marker, ls=style.dashes, ms=5, label=label)
        name = "batch" if phase == "decode" else "tokens of a prompt times batch"
        log_axes(axes, sorted(sizes), name, f"{phase} tokens/s")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _shallowest(cells: pd.DataFrame, phase: Phase) -> pd.DataFrame:
    """Return a line with its abscissa as `size`: decodes at the smallest depth by batch, or prefills by all tokens."""
    if phase == "decode":
        cells = cells[cells["context_len"] == cells["context_len"].min()]
    size = cells["batch_size"] * (1 if phase == "decode" else cells["prompt_len"])
    line: pd.DataFrame = cells.assign(size=size).sort_values("size").drop_duplicates("size")
    return line


def steps(run: Run) -> Figure:
    """Return the cumulative distribution of the timed decode steps of some cells, from the smallest to the largest.

    Times are relative to the cell's median. Raises RequestError for a run without a decode step.
    """
    times = {
        cell: np.sort([time_s for visit in visits for time_s in steady(visit.decode_s)])
        for cell, visits in read_gathered(run.folder, run.document).visits.items()
        if cell.engine == first_engine(run)
    }
    times = {cell: steps_s for cell, steps_s in times.items() if len(steps_s)}
    if not times:
        raise _no_decode(run)
    figure, axes = plt.subplots(figsize=(9, 4.8))
    for cell, style in zip(evenly(sorted(times), len(LINE_STYLES)), LINE_STYLES, strict=False):
        middle, number = float(np.median(times[cell])), len(times[cell])
        share = 100 * np.arange(1, number + 1) / number
        label = f"batch {cell.name}: {number} steps, median {1e3 * middle:.3g} ms"
        axes.step(times[cell] / middle, share, ls=style.dashes, lw=1.8, where="post", label=label)
    for percentile in (50, 90, 99):
        axes.axhline(percentile, color="#bbbbbb", lw=0.8)
        place: Any = {"xycoords": ("axes fraction", "data"), "xytext": (3, -3), "textcoords": "offset points"}
        axes.annotate(f"p{percentile}", (1, percentile), fontsize=9, **place)
    axes.set(xlabel="time of a step over the cell's median", ylabel="steps up to this time, %", ylim=(0, 101))
    widest = max(float(np.percentile(steps_s, 99.5) / np.median(steps_s)) for steps_s in times.values())
    axes.set_xlim(0.9, min(max(widest, 1.15), 3.0))
    axes.legend(loc="lower right")
    axes.set_title(title(run))
    return figure
