"""Charts of one figure over another: throughput, depth, doubling, precisions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import ColorType

from profiler.errors import RequestError
from profiler.grid.cells import Phase
from profiler.judge.scaling import Doubling, DoublingTest
from profiler.report.blocks import evenly
from profiler.report.plots.style import (
    LINE_STYLES,
    PHASE_STYLE,
    LineStyle,
    depth_column,
    depth_label,
    distinct_names,
    first_engine_frame,
    log_axes,
    panels_in_a_row,
    phases_of,
    short,
    title,
    with_forecasts,
)
from profiler.report.selection import first_engine
from profiler.store.folder import Run

_STEP: dict[Phase, str] = {"prefill": "prefill", "decode": "decode step"}


def throughput(run: Run) -> Figure:
    """Return decode tokens/s and the time per step against the batch, a line per depth, with intervals.

    Forecasts are open markers. Raises RequestError for a run without a measured decode.
    """
    cells = with_forecasts(run)
    decode = cells[cells["phase"] == "decode"]
    if not (decode["status"] == "ok").any():
        raise RequestError(f"{run.folder} has no decode step: there is nothing to draw.")
    figure, (rate, time) = panels_in_a_row(2, 5.5, 4.4, title(run) + _forecast_note(decode))
    for (depth, line), style in _lines(decode, "context_len"):
        label, line = f"{depth} cached tokens", line.sort_values("batch_size")
        [drawn] = rate.plot(line["batch_size"], line["tokens_per_s"], ls=style.dashes, marker="", label=label)
        _mark(rate, line["batch_size"], line["tokens_per_s"], line, style, drawn.get_color())
        _with_interval(time, line["batch_size"], line, style, label)
    batches = sorted(set(decode["batch_size"]))
    log_axes(rate, batches, "batch", "tokens/s")
    log_axes(time, batches, "batch", "time of a decode step, ms")
    rate.legend()
    return figure


def depth_chart(run: Run) -> Figure:
    """Return the time of a prefill against its prompt and of a decode step against its context, a line per batch.

    Forecasts are open markers.
    """
    cells = with_forecasts(run)
    phases = phases_of(cells)
    figure, panels = panels_in_a_row(len(phases), 5.5, 4.4, title(run) + _forecast_note(cells))
    for axes, phase in zip(panels, phases, strict=True):
        of_phase, depth = cells[cells["phase"] == phase], depth_column(phase)
        for (batch, line), style in _lines(of_phase, "batch_size"):
            line = line.sort_values(depth)
            _with_interval(axes, line[depth], line, style, f"batch {batch}")
        log_axes(axes, sorted(set(of_phase[depth])), depth_label(phase), f"time of a {_STEP[phase]}, ms")
        axes.legend()
    return figure


def _lines(cells: pd.DataFrame, column: str) -> list[tuple[tuple[int, pd.DataFrame], LineStyle]]:
    """Return a frame and a style per value of a column. Of many values evenly picked ones are used, one per style."""
    groups = {int(value): cells[cells[column] == value] for value in sorted(set(cells[column]))}
    return list(zip(evenly(list(groups.items()), len(LINE_STYLES)), LINE_STYLES, strict=False))


def _with_interval(axes: Axes, sizes: pd.Series, line: pd.DataFrame, style: LineStyle, label: str) -> None:
    """Draw times in milliseconds over a size."""
    below, above = line["latency_s"] - line["latency_low_s"], line["latency_high_s"] - line["latency_s"]
    drawn, *_ = axes.errorbar(
        sizes,
        1e3 * line["latency_s"],
        yerr=[1e3 * below, 1e3 * above],
        capsize=2,
        ls=style.dashes,
        label=label,
    )
    _mark(axes, sizes, 1e3 * line["latency_s"], line, style, drawn.get_color())


def _mark(
    axes: Axes, sizes: pd.Series, values: pd.Series, line: pd.DataFrame, style: LineStyle, color: ColorType
) -> None:
    """Draw a filled marker at each measured cell, and an open one at each forecast."""
    for status, face in (("ok", color), ("forecast", "white")):
        chosen = line["status"] == status
        axes.plot(sizes[chosen], values[chosen], ls="", marker=style.marker, ms=5, color=color, mfc=face)


def _forecast_note(cells: pd.DataFrame) -> str:
    return "; open: forecast" if (cells["status"] == "forecast").any() else ""


def doubling(run: Run) -> Figure:
    """Return the slope of log time against log batch at each doubling, next to those that bytes and FLOPs predict.

    Raises RequestError for a run with a single batch size.
    """
    tests = [
        test for test in run.document.scaling if test.axis == "batch" and test.fixed.get("engine") == first_engine(run)
    ]
    chosen: dict[Phase, DoublingTest] = {}
    for phase in PHASE_STYLE:
        if of_phase := [test for test in tests if test.fixed["phase"] == phase]:
            chosen[phase] = of_phase[0]
    if not chosen:
        raise RequestError(f"{run.folder} has one batch size: there is no doubling to draw.")
    figure, panels = panels_in_a_row(len(chosen), 5.8, 4.6, title(run))
    for axes, (phase, test) in zip(panels, chosen.items(), strict=True):
        _slopes(axes, test.doublings)
        axes.set_title(f"{phase}, {test.fixed['prompt_len'] or test.fixed['context_len']} tokens", fontsize=11)
    panels[0].legend()
    return figure


def _slopes(axes: Axes, doublings: Sequence[Doubling]) -> None:
    at = np.arange(len(doublings))
    slope, low, high = (np.array([getattr(item, name) for item in doublings]) for name in ("slope", "low", "high"))
    spread = [np.maximum(slope - low, 0), np.maximum(high - slope, 0)]
    axes.plot(at, [item.bytes_slope for item in doublings], "s--", color="#56B4E9", label="if bytes set the time")
    axes.plot(at, [item.flops_slope for item in doublings], "D:", color="#E69F00", label="if FLOPs set the time")
    axes.errorbar(at, slope, yerr=spread, fmt="o-", color="black", capsize=3, label="measured, with its interval")
    axes.set_xticks(at, [f"{item.smaller} to {item.larger}" for item in doublings])
    axes.set(xlabel="batch", ylabel="slope of time (0: batch is free, 1: no gain)")
    axes.set_ylim(min(-0.1, low.min() - 0.1), max(1.2, high.max() + 0.1))


def precisions(runs: Sequence[Run]) -> Figure:
    """Return tokens/s of several runs of one model against the batch (decode) and the tokens of a prompt (prefill).

    The title has what all runs share; a line's name has its precision and what else differs. Raises RequestError for
    runs of several models.
    """
    if len({(run.model.architecture, run.model.params) for run in runs}) > 1:
        models = " and ".join(dict.fromkeys(run.model.id for run in runs))
        raise RequestError(f"precisions is a picture of one model, not of {models}; `devices` draws several.")
    common, names = _common_and_names(runs)
    tables = [first_engine_frame(run) for run in runs]
    phases: list[Phase] = [phase for phase in ("decode", "prefill") if any((t["phase"] == phase).any() for t in tables)]
    figure, panels = panels_in_a_row(len(phases), 4.5, 4.0, short(common))
    for axes, phase in zip(panels, phases, strict=True):
        sizes: set[int] = set()
        for label, cells, style in zip(names, tables, LINE_STYLES * len(runs), strict=False):
            line = _shallowest(cells[cells["phase"] == phase], phase)
            sizes |= set(line["size"])
            axes.plot(line["size"], line["tokens_per_s"], marker=style.marker, ls=style.dashes, ms=5, label=label)
        name = "batch" if phase == "decode" else "tokens of a prompt times batch"
        log_axes(axes, sorted(sizes), name, f"{phase} tokens/s")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _common_and_names(runs: Sequence[Run]) -> tuple[str, list[str]]:
    """Return the model and device that all runs share, and a name per run that distinguishes it from the others."""
    facts = [(run.model.id, f"on {run.document.device.name}") for run in runs]
    common = [fact for fact in facts[0] if all(fact in others for others in facts)]
    names = [
        ", ".join([run.model.precision, *(fact for fact in facts_of_run if fact not in common)])
        for run, facts_of_run in zip(runs, facts, strict=True)
    ]
    return " ".join(common), distinct_names(runs, names)


def _shallowest(cells: pd.DataFrame, phase: Phase) -> pd.DataFrame:
    """Return a line with its abscissa as `size`: decodes at the smallest depth by batch, or prefills by all tokens."""
    if phase == "decode":
        line = cells[cells["context_len"] == cells["context_len"].min()]
        decodes: pd.DataFrame = line.assign(size=line["batch_size"]).sort_values("size")
        return decodes
    prefills: pd.DataFrame = cells.assign(size=cells["batch_size"] * cells["prompt_len"]).sort_values("size")
    return prefills.drop_duplicates("size")
