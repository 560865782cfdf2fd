"""Charts of a run's cells: tokens/s and step times, doubling, memory, regimes, the time breakdown, waterfalls."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from profiler.errors import RequestError
from profiler.judge.breakdown import TERMS
from profiler.judge.scaling import DoublingTest
from profiler.report.blocks import evenly
from profiler.report.plots.style import REGIME_COLOR, WIDTH_IN, log_axes, panel_grid, phases_of, title
from profiler.report.selection import MOST_SIZES, first_engine, of_first_engine, of_phase, selected_cells, spanning
from profiler.report.time_breakdown import MOST_BARS_A_PHASE, breakdown_bars, terms_of
from profiler.store.folder import Run, cells_frame
from profiler.units import scaled, significant


def throughput(*runs: Run) -> Figure:
    """Return decode tokens/s and the time per step against the batch: a line per depth, or per run at its least depth.

    Bands are the intervals of the times. Raises RequestError for a run without a measured decode, and for runs of
    several models.
    """
    if len({(run.model.architecture, run.model.params) for run in runs}) > 1:
        models = " and ".join(dict.fromkeys(run.model.id for run in runs))
        raise RequestError(f"throughput is a picture of one model, not of {models}.")
    tables = []
    for run, name in zip(runs, _names(runs), strict=True):
        decode = cells_frame(of_phase(of_first_engine(run), "decode"))
        if not len(decode):
            raise RequestError(f"{run.folder} has no decode step: there is nothing to draw.")
        if len(runs) > 1:
            decode = decode[decode["context_len"] == decode["context_len"].min()]
        depths = decode["context_len"].astype(str) + " cached tokens"
        tables.append(decode.assign(line=name if len(runs) > 1 else depths))
    cells = pd.concat(tables)
    figure, (rate, time) = panel_grid(2, 5.5, 4.4, title(runs[0]) if len(runs) == 1 else runs[0].model.id)
    times = cells.melt(["line", "batch_size"], ["latency_low_s", "latency_s", "latency_high_s"], value_name="figure")
    _lines(time, times.assign(figure=1e3 * times["figure"]))
    _lines(rate, cells.assign(figure=cells["tokens_per_s"]), legend=True)
    batches = sorted(set(cells["batch_size"]))
    log_axes(rate, batches, "batch", "tokens/s")
    log_axes(time, batches, "batch", "time of a decode step, ms")
    return figure


def _names(runs: Sequence[Run]) -> list[str]:
    several = len({run.document.device.name for run in runs}) > 1
    names = [run.model.precision + (f" on {run.document.device.name}" if several else "") for run in runs]
    folders = [f" ({run.folder.name})" if names.count(name) > 1 else "" for run, name in zip(runs, names, strict=True)]
    return [name + folder for name, folder in zip(names, folders, strict=True)]


def _lines(axes: Axes, cells: pd.DataFrame, *, legend: bool = False) -> None:
    cells = cells.reset_index(drop=True)
    hue = {"hue": "line", "style": "line", "markers": True, "legend": "auto" if legend else False}
    sns.lineplot(cells, x="batch_size", y="figure", estimator="median", errorbar=("pi", 100), ax=axes, **hue)
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
    figure, panels = panel_grid(len(chosen), 5.8, 4.6, title(run))
    for axes, (phase, test) in zip(panels, chosen.items(), strict=True):
        slopes = []
        for item in test.doublings:
            sizes = f"{item.smaller} to {item.larger}"
            slopes += [(sizes, "measured, with its interval", slope) for slope in (item.low, item.slope, item.high)]
            slopes.append((sizes, "if bytes set the time", item.bytes_slope))
            slopes.append((sizes, "if FLOPs set the time", item.flops_slope))
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
    """Return the memory that cells need by the counts, next to the measured peak and to the device's free memory.

    On a CPU only the whole process is measured, which belongs to no cell. Raises RequestError for a run without counts.
    """
    counted_bytes = {item.key: item.predicted_peak_memory_bytes for item in run.document.evidence}
    sizes: list[tuple[str, str, int | None]] = []
    for cell in spanning(of_first_engine(run), MOST_BARS_A_PHASE):
        if cell.key in counted_bytes:
            sizes.append((cell.key.name, "counted", counted_bytes[cell.key]))
            if run.document.device.kind != "cpu":
                sizes.append((cell.key.name, "measured peak", cell.peak_memory_bytes))
    if not sizes:
        raise RequestError(f"{run.folder} has no counted memory: there is nothing to draw.")
    frame = pd.DataFrame(sizes, columns=["cell", "figure", "bytes"])
    figure, [axes] = panel_grid(1, 10, 1.6 + 0.4 * frame["cell"].nunique(), title(run))
    sns.barplot(frame, x="bytes", y="cell", hue="figure", saturation=1, ax=axes)
    axes.axvline(run.document.device.memory_bytes, color="black", lw=1, ls="--", label="the device's memory")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: scaled(value, "B")))
    axes.set(xlabel="memory", ylabel="")
    axes.legend(title=None)
    return figure


_MOST_BREAKDOWNS_A_PHASE = 12
# Width of the longest regime with its margin, and of an axis with its label.
_WORD_INCHES, _AXIS_INCHES = 0.9, 1.2
_DEPTH_COLUMN = {"prefill": "prompt_len", "decode": "context_len"}


def regime_map(run: Run) -> Figure:
    """Return the regime and the tokens/s of every cell over batch and depth, a panel per phase."""
    cells = cells_frame(of_first_engine(run))
    faces = list(REGIME_COLOR)
    words = cells["regime"].str.removesuffix("-bound") + "\n" + cells["tokens_per_s"].map(significant) + "/s"
    cells = cells.assign(code=cells["regime"].map(faces.index).astype(float), words=words)
    phases = phases_of(cells)
    most = min(MOST_SIZES, int((WIDTH_IN.get() - _AXIS_INCHES) / _WORD_INCHES))
    columns = max(min(len(set(cells.loc[cells["phase"] == phase, _DEPTH_COLUMN[phase]])), most) for phase in phases)
    width = max(5.0, _WORD_INCHES * columns + _AXIS_INCHES)
    figure, panels = panel_grid(len(phases), width, 4.6, f"{title(run)}: regimes and tokens/s")
    colors = {"cmap": list(REGIME_COLOR.values()), "vmin": 0, "vmax": len(faces) - 1, "cbar": False}
    for axes, phase in zip(panels, phases, strict=True):
        depth = _DEPTH_COLUMN[phase]
        mine = cells[cells["phase"] == phase].drop_duplicates(["batch_size", depth])
        depths = evenly(sorted(mine[depth].unique()), most)
        batches = evenly(sorted(mine["batch_size"].unique()), MOST_SIZES)
        shown = mine[mine["batch_size"].isin(batches) & mine[depth].isin(depths)]
        codes, texts = (shown.pivot(index="batch_size", columns=depth, values=name)[::-1] for name in ("code", "words"))
        text = {"annot": texts.fillna(""), "fmt": "", "annot_kws": {"size": 9, "color": "#111111"}}
        sns.heatmap(codes, linewidths=1, ax=axes, **text, **colors)
        axes.tick_params(axis="y", rotation=0)
        tokens = "prompt tokens" if phase == "prefill" else "cached tokens"
        axes.set_xlabel(tokens + _of_all(len(depths), mine[depth].nunique()))
        axes.set_ylabel("batch" + _of_all(len(batches), mine["batch_size"].nunique()))
        axes.set_title(phase, fontsize=11)
    return figure


def _of_all(shown: int, total: int) -> str:
    """Return ` (12 of 20)` for a map that does not show all sizes of an axis; empty if it does."""
    return f" ({shown} of {total})" if shown < total else ""


def breakdown_chart(run: Run) -> Figure:
    """Return a bar per cell with the terms of its time, stacked to 100 %; negative terms are left of zero.

    seaborn stacks no negative terms, and its bars have no hatches.
    """
    bars = breakdown_bars(of_first_engine(run), _MOST_BREAKDOWNS_A_PHASE)
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.34 * len(bars)))
    for term in terms_of(bars):
        segments = [segment for bar in bars for segment in bar.segments if segment.term is term]
        widths, starts = [100 * abs(item.share) for item in segments], [100 * item.start for item in segments]
        style: Any = {"color": term.color, "hatch": term.hatch, "label": term.name}
        axes.barh(range(len(bars)), widths, left=starts, ec="white", lw=0.4, **style)
    axes.axvline(100, color="black", lw=1)
    axes.set_yticks(range(len(bars)), [bar.result.key.name for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlabel("share of the measured time, %")
    axes.set_title(title(run))
    axes_in = axes.get_position().height * figure.get_figheight()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.6 / axes_in), ncols=4, frameon=False)
    return figure


# A term below this share of the step is not drawn.
_WORTH_DRAWING = 0.002


def waterfall(run: Run) -> Figure:
    """Return steps term by term, from nothing to the measured time.

    These are the smallest step of each engine. A run of one engine has the smallest and the largest step of each phase.
    """
    cells = selected_cells(run)
    with_engines = len({cell.engine for cell in run.measured}) > 1
    if with_engines:
        smallest = cells[0].key
        cells = [cell for cell in run.measured if cell.key.on(smallest.cell.engine) == smallest]
    figure, row = panel_grid(len(cells), 3.4, 4.2, f"{title(run)}: term by term")
    for axes, cell in zip(row, cells, strict=True):
        terms_s = [(term, getattr(cell, column)) for column, term in TERMS.items()]
        shown = [(term, term_s) for term, term_s in terms_s if abs(term_s) > _WORTH_DRAWING * cell.latency_s]
        at_s = 0.0
        for position, (term, term_s) in enumerate(shown):
            bottom_s = min(at_s, at_s + term_s)
            axes.bar(position, 1e3 * abs(term_s), bottom=1e3 * bottom_s, color=term.color, hatch=term.hatch)
            at_s += term_s
        axes.bar(len(shown), 1e3 * cell.latency_s, color="#888888")
        names = [*(term.name for term, _ in shown), "measured"]
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
        axes.set_title(cell.key.name, fontsize=10)
        if with_engines:  # on one scale, to be compared
            axes.set_ylim(0, 1.05e3 * max(cell.latency_s for cell in cells))
    row[0].set_ylabel("ms")
    return figure
