"""Charts of one figure over the batch: tokens/s and step times, doubling, memory."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from profiler.errors import RequestError
from profiler.judge.scaling import DoublingTest
from profiler.report.plots.style import distinct_names, log_axes, panel_grid, short, title, with_forecasts
from profiler.report.selection import evidence_of, first_engine, of_first_engine, spanning
from profiler.store.folder import Run
from profiler.units import scaled

_MOST_BARS_A_PHASE = 8
_TIMES = ["latency_low_s", "latency_s", "latency_high_s"]


def throughput(*runs: Run) -> Figure:
    """Return decode tokens/s and the time per step against the batch: a line per depth, or per run at its least depth.

    Bands are the intervals of the times, open markers forecasts. Raises RequestError for a run without a measured
    decode, and for runs of several models.
    """
    if len({(run.model.architecture, run.model.params) for run in runs}) > 1:
        models = " and ".join(dict.fromkeys(run.model.id for run in runs))
        raise RequestError(f"throughput is a picture of one model, not of {models}.")
    tables = []
    for run, name in zip(runs, _names(runs), strict=True):
        cells = with_forecasts(run)
        decode = cells[cells["phase"] == "decode"]
        if not (decode["status"] == "ok").any():
            raise RequestError(f"{run.folder} has no decode step: there is nothing to draw.")
        if len(runs) > 1:
            decode = decode[decode["context_len"] == decode["context_len"].min()]
        depths = decode["context_len"].astype(str) + " cached tokens"
        tables.append(decode.assign(line=name if len(runs) > 1 else depths))
    cells = pd.concat(tables)
    note = "; open: forecast" if (cells["status"] == "forecast").any() else ""
    figure, (rate, time) = panel_grid(1, 2, 5.5, 4.4, (title(runs[0]) if len(runs) == 1 else runs[0].model.id) + note)
    milliseconds = cells.melt(["line", "batch_size", "status"], _TIMES, value_name="figure")
    _lines(time, milliseconds.assign(figure=1e3 * milliseconds["figure"]))
    _lines(rate, cells.assign(figure=cells["tokens_per_s"]), legend=True)
    batches = sorted(set(cells["batch_size"]))
    log_axes(rate, batches, "batch", "tokens/s")
    log_axes(time, batches, "batch", "time of a decode step, ms")
    return figure


def _names(runs: Sequence[Run]) -> list[str]:
    """Return a name per run: its precision, and its device if the runs have several."""
    several = len({run.document.device.name for run in runs}) > 1
    places = [f" on {run.document.device.name}" if several else "" for run in runs]
    return distinct_names(runs, [short(run.model.precision + place) for run, place in zip(runs, places, strict=True)])


def _lines(axes: Axes, cells: pd.DataFrame, *, legend: bool = False) -> None:
    """Draw `figure` against the batch: the median of a batch's rows, and a band from the least to the largest."""
    cells = cells.reset_index(drop=True)
    hue = {"hue": "line", "style": "line", "markers": True, "legend": "auto" if legend else False}
    sns.lineplot(cells, x="batch_size", y="figure", estimator="median", errorbar=("pi", 100), ax=axes, **hue)
    forecast = cells[cells["status"] == "forecast"].groupby(["line", "batch_size"], as_index=False)["figure"].median()
    axes.plot(forecast["batch_size"], forecast["figure"], "o", mfc="white", mec="#888888", ms=5)
    if legend:
        axes.legend(title=None)


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
        slopes = [
            (f"{item.smaller} to {item.larger}", name, value)
            for item in test.doublings
            for name, values in (
                ("measured, with its interval", (item.low, item.slope, item.high)),
                ("if bytes set the time", (item.bytes_slope,)),
                ("if FLOPs set the time", (item.flops_slope,)),
            )
            for value in values
        ]
        frame = pd.DataFrame(slopes, columns=["batch", "slope", "value"])
        lines = {"hue": "slope", "style": "slope", "markers": True, "palette": ["black", "#56B4E9", "#E69F00"]}
        lines["legend"] = axes is panels[0] and "auto"
        sns.lineplot(frame, x="batch", y="value", estimator="median", errorbar=("pi", 100), ax=axes, **lines)
        axes.set(ylabel="slope of time (0: batch is free, 1: no gain)")
        axes.set_ylim(min(-0.1, frame["value"].min() - 0.1), max(1.2, frame["value"].max() + 0.1))
        axes.set_title(f"{phase}, {test.fixed['prompt_len'] or test.fixed['context_len']} tokens", fontsize=11)
    panels[0].legend(title=None)
    return figure


def memory(run: Run) -> Figure:
    """Return the memory that cells need by the counts, next to the measured peak and to the device's room.

    On a CPU only the whole process is measured, which belongs to no cell. Raises RequestError for a run without counts.
    """
    evidence = evidence_of(run)
    sizes = []
    for cell in spanning(of_first_engine(run), _MOST_BARS_A_PHASE):
        if cell.key in evidence:
            sizes.append((cell.key.name, "counted", evidence[cell.key].predicted_peak_memory_bytes))
            if run.document.device.kind != "cpu":
                sizes.append((cell.key.name, "measured peak", cell.peak_memory_bytes))
    if not sizes:
        raise RequestError(f"{run.folder} has no counted memory: there is nothing to draw.")
    frame = pd.DataFrame(sizes, columns=["cell", "figure", "bytes"])
    figure, [axes] = panel_grid(1, 1, 10, 1.6 + 0.4 * frame["cell"].nunique(), title(run))
    sns.barplot(frame, x="bytes", y="cell", hue="figure", saturation=1, ax=axes)
    axes.axvline(run.document.device.memory_bytes, color="black", lw=1, ls="--", label="the device's memory")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: scaled(value, "B")))
    axes.set(xlabel="memory", ylabel="")
    axes.legend(title=None)
    return figure
