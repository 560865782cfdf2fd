"""Pictures of one figure against another: throughput, depth, doubling, the steps themselves, precisions."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from profiler.errors import RequestError
from profiler.record.run import Run, read_samples
from profiler.report.plots.style import LINE_STYLES, PHASE_STYLE, depth_column, first_engine, log_axes, precision, title

_MOST_LINES = len(LINE_STYLES)


def throughput(run: Run) -> Figure:
    """Decode tokens/s and the time of a step against the batch, one line a depth, with their intervals."""
    decode = _decode(run)
    figure, (rate, time) = plt.subplots(1, 2, figsize=(11, 4.4))
    for (depth, line), style in zip(_lines(decode, "context_len"), LINE_STYLES, strict=False):
        shown = {"marker": style[0], "ls": style[1], "ms": 5, "label": f"{depth} cached tokens"}
        line = line.sort_values("batch_size")
        rate.plot(line["batch_size"], line["tokens_per_s"], **shown)
        time.errorbar(line["batch_size"], 1e3 * line["latency_s"], yerr=_spread_ms(line), capsize=2, **shown)
    batches = sorted(set(decode["batch_size"]))
    log_axes(rate, batches, "batch", "tokens/s")
    log_axes(time, batches, "batch", "time of a decode step, ms")
    rate.legend()
    figure.suptitle(title(run), x=0.01, ha="left", fontsize=12)
    return figure


def against_depth(run: Run) -> Figure:
    """The time of a prefill against its prompt and of a decode step against its context, one line a batch."""
    cells = first_engine(run)
    phases = [phase for phase in PHASE_STYLE if (cells["phase"] == phase).any()]
    figure, panels = plt.subplots(1, len(phases), figsize=(5.5 * len(phases), 4.4), squeeze=False)
    for axes, phase in zip(panels[0], phases, strict=True):
        of_phase, depth = cells[cells["phase"] == phase], depth_column(phase)
        for (batch, line), style in zip(_lines(of_phase, "batch_size"), LINE_STYLES, strict=False):
            line = line.sort_values(depth)
            shown = {"marker": style[0], "ls": style[1], "ms": 5, "label": f"batch {batch}"}
            axes.errorbar(line[depth], 1e3 * line["latency_s"], yerr=_spread_ms(line), capsize=2, **shown)
        name = "prompt tokens" if phase == "prefill" else "cached tokens"
        log_axes(axes, sorted(set(of_phase[depth])), name, f"time of a {_UNIT[phase]}, ms")
        axes.legend()
    figure.suptitle(title(run), x=0.01, ha="left", fontsize=12)
    return figure


_UNIT = {"prefill": "prefill", "decode": "decode step"}


def doubling(run: Run) -> Figure:
    """The slope of log time against log batch at each doubling, beside those that bytes and FLOPs predict.

    Raises RequestError for a run with a single batch size.
    """
    engine = run.document.engine["names"][0]
    tests = [item for item in run.document.scaling if item["axis"] == "batch" and item["fixed"].get("engine") == engine]
    shown = [item for phase in PHASE_STYLE for item in tests if item["fixed"]["phase"] == phase]
    chosen = [next(item for item in shown if item["fixed"]["phase"] == phase) for phase in _phases(shown)]
    if not chosen:
        raise RequestError(f"{run.folder} has one batch size: there is no doubling to draw.")
    figure, panels = plt.subplots(1, len(chosen), figsize=(5.8 * len(chosen), 4.6), squeeze=False)
    for axes, item in zip(panels[0], chosen, strict=True):
        _slopes(axes, item["doublings"])
        fixed = item["fixed"]
        depth = fixed["prompt_len"] or fixed["context_len"]
        axes.set_title(f"{fixed['phase']}, {depth} tokens", fontsize=11)
    panels[0][0].legend()
    figure.suptitle(title(run), x=0.01, ha="left", fontsize=12)
    return figure


def _phases(tests: Sequence[dict[str, dict[str, str]]]) -> list[str]:
    return [phase for phase in PHASE_STYLE if any(item["fixed"]["phase"] == phase for item in tests)]


def _slopes(axes: Axes, doublings: Sequence[dict[str, float]]) -> None:
    at = np.arange(len(doublings))
    slope = np.array([item["slope"] for item in doublings])
    low, high = (np.array([item[end] for item in doublings]) for end in ("low", "high"))
    spread = [np.maximum(slope - low, 0), np.maximum(high - slope, 0)]
    axes.plot(at, [item["bytes_slope"] for item in doublings], "s--", color="#56B4E9", label="if bytes set the time")
    axes.plot(at, [item["flops_slope"] for item in doublings], "D:", color="#E69F00", label="if FLOPs set the time")
    axes.errorbar(at, slope, yerr=spread, fmt="o-", color="black", capsize=3, label="measured, with its interval")
    axes.set_xticks(at, [f"{item['smaller']} to {item['larger']}" for item in doublings])
    axes.set(xlabel="batch", ylabel="slope of log time against log batch")
    axes.set_ylim(min(-0.1, low.min() - 0.1), max(1.2, high.max() + 0.1))


def steps(run: Run) -> Figure:
    """Every decode step that was timed, as shares of all steps up to a time: of the smallest cell and of the largest.

    Raises RequestError for a run without a decode.
    """
    engine = run.document.engine["names"][0]
    found: dict[tuple[int, int], list[float]] = {}
    for record in read_samples(run.folder):
        if record["kind"] == "visit" and record.get("engine", engine) == engine and record["decode_s"]:
            key = record["batch_size"], record["prompt_len"] or record.get("context_len", 0)
            found.setdefault(key, []).extend(record["decode_s"][1:])
    if not found:
        raise RequestError(f"{run.folder} has no decode step: there is nothing to draw.")
    figure, axes = plt.subplots(figsize=(9, 4.8))
    for (batch, depth), style in zip(_spaced(sorted(found)), LINE_STYLES, strict=False):
        times = np.sort(found[batch, depth])
        middle = float(np.median(times))
        share = 100 * np.arange(1, len(times) + 1) / len(times)
        name = f"batch {batch} x {depth}: {len(times)} steps, median {1e3 * middle:.3g} ms"
        axes.step(times / middle, share, ls=style[1], lw=1.8, where="post", label=name)
    for percentile in (50, 90, 99):
        axes.axhline(percentile, color="#bbbbbb", lw=0.8)
        axes.annotate(
            f"p{percentile}",
            (1, percentile),
            xycoords=("axes fraction", "data"),
            xytext=(3, -3),
            textcoords="offset points",
            fontsize=9,
        )
    axes.set(xlabel="time of a step over the cell's median", ylabel="steps up to this time, %", ylim=(0, 101))
    widest = max(float(np.percentile(times, 99.5) / np.median(times)) for times in found.values())
    axes.set_xlim(0.9, min(max(widest, 1.15), 3.0))
    axes.legend(loc="lower right")
    axes.set_title(title(run))
    return figure


def precisions(runs: Sequence[Run]) -> Figure:
    """Tokens/s of several runs of one model against the batch (decode) and the tokens of a prompt (prefill)."""
    tables = [first_engine(run) for run in runs]
    panels = [phase for phase in ("decode", "prefill") if any((cells["phase"] == phase).any() for cells in tables)]
    figure, axes_row = plt.subplots(1, len(panels), figsize=(5.8 * len(panels), 4.6), squeeze=False)
    for axes, phase in zip(axes_row[0], panels, strict=True):
        sizes: set[int] = set()
        for run, cells, style in zip(runs, tables, LINE_STYLES * len(runs), strict=False):
            line = _shallowest(cells[cells["phase"] == phase], phase)
            sizes |= set(line["size"])
            axes.plot(line["size"], line["tokens_per_s"], marker=style[0], ls=style[1], ms=5, label=precision(run))
        name = "batch" if phase == "decode" else "tokens of a prompt times batch"
        log_axes(axes, sorted(sizes), name, f"{phase} tokens/s")
    axes_row[0][0].legend()
    model, device = runs[0].document.model, runs[0].document.device
    figure.suptitle(f"{model['id']} on {device['name']}", x=0.01, ha="left", fontsize=12)
    return figure


def _shallowest(cells: pd.DataFrame, phase: str) -> pd.DataFrame:
    """Decodes along the batch at the smallest depth, or prefills along all their tokens, with that as `size`."""
    if phase == "decode":
        line = cells[cells["context_len"] == cells["context_len"].min()]
        decodes: pd.DataFrame = line.assign(size=line["batch_size"]).sort_values("size")
        return decodes
    line = cells.assign(size=cells["batch_size"] * cells["prompt_len"]).sort_values("size")
    whole: pd.DataFrame = line.drop_duplicates("size")
    return whole


def _decode(run: Run) -> pd.DataFrame:
    cells = first_engine(run)
    found: pd.DataFrame = cells[cells["phase"] == "decode"]
    return found


def _lines(cells: pd.DataFrame, column: str) -> list[tuple[int, pd.DataFrame]]:
    """A frame for each value of a column; of many values those that span them, so that lines can be told apart."""
    groups = dict(list(cells.groupby(column)))
    return [(int(key), groups[key]) for key in _spaced(sorted(groups))]


def _spaced(values: Sequence) -> list:  # type: ignore[type-arg]
    if len(values) <= _MOST_LINES:
        return list(values)
    return [values[index] for index in np.linspace(0, len(values) - 1, _MOST_LINES).round().astype(int)]


def _spread_ms(line: pd.DataFrame) -> list[pd.Series]:
    return [1e3 * (line["latency_s"] - line["latency_low_s"]), 1e3 * (line["latency_high_s"] - line["latency_s"])]
