"""Pictures of a run, drawn from its folder alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, StrMethodFormatter

from profiler.errors import RequestError, near_misses
from profiler.runstore import Run
from profiler.units import scaled

# Okabe & Ito's colour-blind safe colours; markers differ too, so that colour never carries meaning alone.
_PHASE_STYLE = {
    "prefill": {"color": "#D55E00", "marker": "^", "label": "prefill"},
    "decode": {"color": "#0072B2", "marker": "o", "label": "decode"},
}
_ROOF_COLOR = "#222222"
_SHEET_COLOR = "#888888"
_LINK_COLOR = "#CC79A7"
_MARGIN = 3.0


def roofline(run: Run) -> Figure:
    """Achieved FLOP/s against arithmetic intensity on log axes, under the measured and the datasheet roofs."""
    figure, axes = plt.subplots(figsize=(10, 6.2), layout="constrained")
    cells = run.cells[run.cells["status"] == "ok"]
    ceilings, device = run.document.ceilings, run.document.device
    dtype = run.document.model["dtype"]
    bandwidth = ceilings["memory_bytes_per_s"]
    roofs = {name: roof["per_s"] for name, roof in ceilings["compute"].items()}
    peak = roofs.get(dtype, max(roofs.values()))
    x_low, x_high = _limits(cells["intensity"], peak / bandwidth)
    y_low, y_high = _limits(cells["flops_per_s"], peak, *roofs.values(), device.get("datasheet_flops_per_s"))
    axes.set(xscale="log", yscale="log", xlim=(x_low, x_high), ylim=(y_low, y_high))

    _roof(
        axes,
        bandwidth,
        peak,
        x_low,
        x_high,
        _ROOF_COLOR,
        "-",
        f"measured: {scaled(bandwidth, 'B/s')}, {scaled(peak, 'FLOP/s')} {dtype}",
    )
    for name, value in sorted(roofs.items(), key=lambda item: -item[1]):
        if name != dtype:
            axes.plot([value / bandwidth, x_high], [value, value], color=_ROOF_COLOR, lw=1, ls=":")
            axes.annotate(
                f"{name} {scaled(value, 'FLOP/s')}",
                (x_high, value),
                xytext=(-4, 3),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color=_ROOF_COLOR,
            )
    if device.get("datasheet_flops_per_s") and device.get("datasheet_bytes_per_s"):
        sheet_bandwidth, sheet_peak = device["datasheet_bytes_per_s"], device["datasheet_flops_per_s"]
        label = f"datasheet (dense): {scaled(sheet_bandwidth, 'B/s')}, {scaled(sheet_peak, 'FLOP/s')}"
        _roof(axes, sheet_bandwidth, sheet_peak, x_low, x_high, _SHEET_COLOR, "--", label)
    for where, link in ceilings["links"].items():
        _roof(
            axes,
            link["per_s"],
            peak,
            x_low,
            x_high,
            _LINK_COLOR,
            "-.",
            f"from the {where}: {scaled(link['per_s'], 'B/s')}",
        )
    ridge = peak / bandwidth
    axes.axvline(ridge, color=_ROOF_COLOR, lw=0.8, ls=":", ymax=0.97)
    axes.annotate(
        f"ridge {ridge:.3g} FLOP/byte",
        (ridge, y_low),
        xytext=(5, 8),
        textcoords="offset points",
        fontsize=9,
        rotation=90,
        va="bottom",
    )
    for phase, style in _PHASE_STYLE.items():
        _points(axes, cells[cells["phase"] == phase], style)
    axes.set_xlabel("arithmetic intensity, model FLOPs per model byte")
    axes.set_ylabel("achieved FLOP/s")
    axes.set_title(_title(run), loc="left", fontsize=12)
    axes.legend(loc="lower right", frameon=True, fontsize=9)
    return figure


def _points(axes: Axes, cells: pd.DataFrame, style: dict[str, Any]) -> None:
    """A phase's cells; those of one prompt length are joined along batch, and the ends are named."""
    if cells.empty:
        return
    axes.plot([], [], color=style["color"], marker=style["marker"], ls="-", label=style["label"])
    for _prompt_len, line in cells.sort_values("batch_size").groupby("prompt_len"):
        axes.plot(
            line["intensity"], line["flops_per_s"], color=style["color"], marker=style["marker"], ms=6, lw=1, alpha=0.85
        )
    ranked = cells.sort_values("flops_per_s")
    smallest, largest = ranked.iloc[0], ranked.iloc[-1]
    for row, offset, align in ((smallest, (0, -16), "center"), (largest, (0, 9), "center")):
        axes.annotate(
            f"b{row['batch_size']} x {row['prompt_len']}",
            (row["intensity"], row["flops_per_s"]),
            xytext=offset,
            textcoords="offset points",
            ha=align,
            fontsize=9,
            color=style["color"],
        )


def _roof(
    axes: Axes, bandwidth: float, peak: float, x_low: float, x_high: float, color: str, style: str, label: str
) -> None:
    x = np.array([x_low, peak / bandwidth, x_high])
    axes.plot(x, np.minimum(x * bandwidth, peak), color=color, ls=style, lw=2, label=label)


def _limits(values: pd.Series, *roofs: float | None) -> tuple[float, float]:
    everything = np.array([*values.to_numpy(dtype=float), *(roof for roof in roofs if roof)])
    return float(everything.min() / _MARGIN), float(everything.max() * _MARGIN)


_REGIME_COLOR = {
    "memory-bound": "#56B4E9",
    "compute-bound": "#E69F00",
    "overhead-bound": "#CC79A7",
    "mixed": "#F0E442",
    "inconclusive": "#DDDDDD",
}
_SPLIT_STYLE = {
    "weights_s": ("weights", "#0072B2", ""),
    "kv_s": ("KV cache", "#56B4E9", "//"),
    "compute_s": ("arithmetic", "#E69F00", ""),
    "dequantise_s": ("dequantisation", "#009E73", "oo"),
    "kernel_s": ("kernels below the roof", "#D55E00", "\\\\"),
    "avoidable_s": ("avoidable copies", "#F0E442", ""),
    "dispatch_s": ("dispatch", "#CC79A7", ".."),
    "unexplained_s": ("unexplained", "#999999", "xx"),
}
_MOST_BARS = 24


def regime_map(run: Run) -> Figure:
    """The regime of every cell over batch and depth, one panel a phase; lines where it changes."""
    cells = _first_engine(run)
    phases = [phase for phase in _PHASE_STYLE if (cells["phase"] == phase).any()]
    figure, panels = plt.subplots(1, len(phases), figsize=(6.2 * len(phases), 4.6), layout="constrained", squeeze=False)
    for axes, phase in zip(panels[0], phases, strict=True):
        depth = "prompt_len" if phase == "prefill" else "context_len"
        table = cells[cells["phase"] == phase].pivot_table(
            index="batch_size", columns=depth, values="regime", aggfunc="first"
        )
        _map_panel(axes, table)
        axes.set_title(phase, loc="left", fontsize=11)
        axes.set_xlabel("prompt tokens" if phase == "prefill" else "cached tokens")
        axes.set_ylabel("batch")
    figure.suptitle(_title(run), x=0.01, ha="left", fontsize=12)
    return figure


def _map_panel(axes: Axes, table: pd.DataFrame) -> None:
    rows, columns = table.shape
    for row in range(rows):
        for column in range(columns):
            regime = table.iat[row, column]
            if not isinstance(regime, str):
                continue
            axes.add_patch(Rectangle((column, row), 1, 1, color=_REGIME_COLOR[regime], ec="white", lw=1))
            axes.text(column + 0.5, row + 0.5, regime.replace("-bound", ""), ha="center", va="center", fontsize=8)
            for other, line in (
                ((row, column + 1), ((column + 1,) * 2, (row, row + 1))),
                ((row + 1, column), ((column, column + 1), (row + 1,) * 2)),
            ):
                inside = other[0] < rows and other[1] < columns
                if inside and table.iat[other] != regime:
                    axes.plot(*line, color="black", lw=2)
    axes.set(xlim=(0, columns), ylim=(0, rows))
    axes.set_xticks([column + 0.5 for column in range(columns)], [str(value) for value in table.columns])
    axes.set_yticks([row + 0.5 for row in range(rows)], [str(value) for value in table.index])
    axes.grid(visible=False)


def step_split(run: Run) -> Figure:
    """Every cell's time as its terms, stacked to a whole; a negative term lies left of zero."""
    cells = _first_engine(run)
    if len(cells) > _MOST_BARS:
        cells = cells.iloc[np.linspace(0, len(cells) - 1, _MOST_BARS).round().astype(int)]
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.34 * len(cells)), layout="constrained")
    names = [_cell_name(row) for row in cells.to_dict("records")]
    left, right = np.zeros(len(cells)), np.zeros(len(cells))
    for column, (label, color, hatch) in _SPLIT_STYLE.items():
        share = 100 * (cells[column] / cells["latency_s"]).to_numpy(dtype=float)
        start = np.where(share >= 0, right, left + share)
        axes.barh(names, np.abs(share), left=start, color=color, hatch=hatch, ec="white", lw=0.4, label=label)
        right, left = right + np.maximum(share, 0), left + np.minimum(share, 0)
    axes.axvline(100, color="black", lw=1)
    axes.invert_yaxis()
    axes.set_xlabel("share of the measured time, %")
    axes.set_title(_title(run), loc="left", fontsize=12)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12 - 0.6 / len(cells)), ncols=4, frameon=False, fontsize=9)
    return figure


def throughput(run: Run) -> Figure:
    """Decode tokens/s and the time of a step against the batch, one line a depth, with their intervals."""
    cells = _first_engine(run)
    decode = cells[cells["phase"] == "decode"]
    figure, (rate, time) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for (depth, line), style in zip(decode.groupby("context_len"), _LINE_STYLES * 10, strict=False):
        line = line.sort_values("batch_size")
        shown = {"marker": style[0], "ls": style[1], "ms": 5, "label": f"{depth} cached tokens"}
        spread = [
            1e3 * (line["latency_s"] - line["latency_low_s"]),
            1e3 * (line["latency_high_s"] - line["latency_s"]),
        ]
        rate.plot(line["batch_size"], line["tokens_per_s"], **shown)
        time.errorbar(line["batch_size"], 1e3 * line["latency_s"], yerr=spread, capsize=2, **shown)
    for axes, label in ((rate, "tokens/s"), (time, "time of a decode step, ms")):
        axes.set(xscale="log", yscale="log", xlabel="batch", ylabel=label)
        batches = sorted(set(decode["batch_size"]))
        axes.set_xticks(batches, [str(batch) for batch in batches], minor=False)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0, 7.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    rate.legend(frameon=True, fontsize=8)
    figure.suptitle(_title(run), x=0.01, ha="left", fontsize=12)
    return figure


_LINE_STYLES = [("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-")]

PLOTS: dict[str, Callable[[Run], Figure]] = {
    "roofline": roofline,
    "map": regime_map,
    "split": step_split,
    "throughput": throughput,
}


def save(run: Run, name: str, path: Path) -> None:
    """Draw one of PLOTS and save it; the file's ending decides between PNG and SVG.

    Raises RequestError for a name that is not known and for a run without a cell that has a number.
    """
    if name not in PLOTS:
        raise RequestError(f"no picture is called {name!r}; use {', '.join(PLOTS)}.{near_misses(name, tuple(PLOTS))}")
    if not (run.cells["status"] == "ok").any():
        raise RequestError(f"{run.folder} has no cell with a number: there is nothing to draw.")
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = PLOTS[name](run)
        figure.savefig(path, dpi=150, bbox_inches="tight")
        plt.close(figure)


def _first_engine(run: Run) -> pd.DataFrame:
    cells = run.cells
    first = run.document.engine["names"][0]
    found: pd.DataFrame = cells[(cells["status"] == "ok") & (cells["engine"] == first)]
    return found


def _cell_name(row: dict[Any, Any]) -> str:
    return f"{row['phase']} {row['batch_size']} x {row['prompt_len'] or row['context_len']}"


def _title(run: Run) -> str:
    model = run.document.model
    quant = "" if model["quant"] == "none" else f", {model['quant']}"
    return f"{model['id']}, {model['dtype']}{quant}, on {run.document.device['name']}"
