"""Pictures of a run, drawn from its folder alone."""

from __future__ import annotations

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


def save_roofline(run: Run, path: Path) -> None:
    """Draw the roofline and save it as a PNG or SVG."""
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = roofline(run)
        figure.savefig(path, dpi=150)
        plt.close(figure)


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
    model = run.document.model
    quant = "" if model["quant"] == "none" else f", {model['quant']}"
    axes.set_title(f"{model['id']}, {dtype}{quant}, on {device['name']}", loc="left", fontsize=12)
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
