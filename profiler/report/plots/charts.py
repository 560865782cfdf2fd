"""Charts of a run's cells: tokens/s and step times, doubling, memory, regimes, the time breakdown, waterfalls."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from profiler.errors import RequestError
from profiler.grid.cells import PHASES, Phase
from profiler.judge.breakdown import TERMS
from profiler.judge.scaling import DoublingTest
from profiler.report.blocks import evenly
from profiler.report.changes import waterfalls
from profiler.report.plots.style import (
    REGIME_COLOR,
    depth_column,
    depth_label,
    distinct_names,
    log_axes,
    panel_grid,
    phases_of,
    short,
    title,
    with_forecasts,
)
from profiler.report.selection import (
    MOST_SIZES,
    evidence_of,
    first_engine,
    of_all,
    of_first_engine,
    selected_cells,
    spanning,
)
from profiler.report.time_breakdown import breakdown_bars, terms_of
from profiler.store.folder import Run
from profiler.units import scaled, significant

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


NO_ROOM = "no room"
_FACES = {**REGIME_COLOR, NO_ROOM: "#BBBBBB", "forecast": "#FAFAFA"}
_MOST_BREAKDOWNS_A_PHASE = 12
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
    sns.heatmap(codes, annot=words, fmt="", annot_kws={"size": 9, "color": "#111111"}, linewidths=1, ax=axes, **colors)
    axes.tick_params(axis="y", rotation=0)
    axes.set_xlabel(depth_label(phase) + of_all(len(depths), cells[depth].nunique()))
    axes.set_ylabel("batch" + of_all(len(batches), cells["batch_size"].nunique()))


def breakdown_chart(run: Run) -> Figure:
    """Return a bar per cell with the terms of its time, stacked to 100 %; negative terms are left of zero.

    seaborn stacks no negative terms, and its bars have no hatches.
    """
    bars = breakdown_bars(of_first_engine(run), _MOST_BREAKDOWNS_A_PHASE)
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


_PANELS_A_PHASE = 2
_TOTAL_COLOR = "#888888"
# A term that changed by less than this share of the step is not drawn.
_WORTH_DRAWING = 0.002


@dataclass(frozen=True)
class Panel:
    """One cell: its two times, and the change of each term between them, in seconds."""

    name: str
    ends: tuple[str, str]
    times_s: tuple[float, float]
    terms: Mapping[str, float]


def waterfall(run: Run) -> Figure:
    """Return steps term by term: those in which an engine differs most from the first, or the first engine's own.

    A run of one engine, or whose engines differ by no more than noise, has the smallest and the largest cell of each
    phase.
    """
    results, panels = run.by_key(), []
    for phase in reversed(PHASES):
        differences = [item for item in waterfalls(run) if item.phase == phase]
        for item in sorted(differences, key=lambda item: -abs(item.saves_s))[:_PANELS_A_PHASE]:
            first = replace(item.key, cell=replace(item.key.cell, engine=item.against))
            ends = (results[first].latency_s, results[item.key].latency_s)
            name = f"{phase} {item.batch_size} x {item.key.cell.depth}"
            panels.append(Panel(name, (item.against, item.engine), ends, item.terms))
    for cell in [] if panels else selected_cells(run):
        terms = {term: getattr(cell, term) for term in TERMS}
        panels.append(Panel(cell.key.name, ("", "measured"), (0.0, cell.latency_s), terms))
    figure, row = panel_grid(1, len(panels), 3.4, 4.2, f"{title(run)}: term by term")
    for axes, panel in zip(row, panels, strict=True):
        _draw(axes, panel)
    row[0].set_ylabel("ms")
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    total_s, after_s = panel.times_s
    worth_s = _WORTH_DRAWING * max(panel.times_s)
    moved = {name: panel.terms[name] for name in TERMS if abs(panel.terms.get(name, 0.0)) > worth_s}
    names = [panel.ends[0], *(TERMS[name].name for name in moved), panel.ends[1]]
    axes.bar(0, 1e3 * total_s, color=_TOTAL_COLOR)
    at_s = least_s = total_s
    for position, (name, gain) in enumerate(moved.items(), 1):
        term = TERMS[name]
        axes.bar(position, 1e3 * abs(gain), bottom=1e3 * min(at_s, at_s + gain), color=term.color, hatch=term.hatch)
        axes.plot([position - 1, position], [1e3 * at_s] * 2, color=_TOTAL_COLOR, lw=0.8)
        at_s += gain
        least_s = min(least_s, at_s)
    axes.bar(len(names) - 1, 1e3 * after_s, color=_TOTAL_COLOR)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    # The axis begins at zero. If changes are small compared with the whole, it begins just below them, and slashes mark
    # the cut at the feet of the whole bars.
    least_ms = 1e3 * (min(least_s, after_s) - 2 * sum(map(abs, moved.values())) - 0.02 * total_s)
    axes.set_ylim(max(0.0, least_ms))
    foot = axes.get_xaxis_transform()
    for at, height in itertools.product((0, len(names) - 1), (0.015, 0.04)) if least_ms > 0 else ():
        axes.plot([at - 0.45, at + 0.45], [height - 0.01, height + 0.01], transform=foot, color="white", lw=2)
    cut = f"\n(axis cut at {significant(least_ms)} ms)" if least_ms > 0 else ""
    axes.set_title(panel.name + cut, fontsize=10)
