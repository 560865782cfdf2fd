"""The roofline: achieved FLOP/s against arithmetic intensity, under every roof that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from profiler.record.run import Run
from profiler.report.plots.style import LINE_STYLES, PHASE_STYLE, measured, title
from profiler.report.roofs import cache_levels, dispatch_roof
from profiler.units import duration, scaled

_ROOF_COLOR = "#222222"
_SHEET_COLOR = "#888888"
_LINK_COLOR = "#CC79A7"
_CACHE_COLOR = "#009E73"
_CACHE_STYLES = ((0, (1, 2)), (0, (4, 2, 1, 2)))
_DISPATCH_COLOR = "#E69F00"
_MARGIN = 3.0


def roofline(run: Run) -> Figure:
    """Achieved FLOP/s against arithmetic intensity on log axes, under the measured and the datasheet roofs."""
    figure, axes = plt.subplots(figsize=(10, 6.4))
    cells = measured(run)
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
    for level, dashes in zip(cache_levels(run), _CACHE_STYLES, strict=False):
        label = f"a cache, at {level.nbytes >> 20} MiB: {scaled(level.bytes_per_s, 'B/s')}"
        _roof(axes, level.bytes_per_s, peak, x_low, x_high, _CACHE_COLOR, dashes, label, width=1.2)
    if (dispatch := dispatch_roof(run)) is not None:
        decodes = cells[cells["phase"] == "decode"]["intensity"]
        x = np.array([decodes.min() / _MARGIN, min(decodes.max() * _MARGIN, peak / dispatch.bytes_per_s)])
        label = f"dispatch of a decode step: {duration(dispatch.step_s)}"
        axes.plot(x, x * dispatch.bytes_per_s, color=_DISPATCH_COLOR, ls=(0, (6, 1.5)), lw=1.6, label=label)
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
    for phase, style in PHASE_STYLE.items():
        _points(axes, cells[cells["phase"] == phase], style)
    axes.set_xlabel("arithmetic intensity, model FLOPs per model byte")
    axes.set_ylabel("achieved FLOP/s")
    axes.set_title(title(run))
    axes.legend(loc="lower right")
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
    axes: Axes,
    bandwidth: float,
    peak: float,
    x_low: float,
    x_high: float,
    color: str,
    style: str | tuple[int, tuple[float, ...]],
    label: str,
    width: float = 2.0,
) -> None:
    x = np.array([x_low, peak / bandwidth, x_high])
    axes.plot(x, np.minimum(x * bandwidth, peak), color=color, ls=style, lw=width, label=label)


def _limits(values: pd.Series, *roofs: float | None) -> tuple[float, float]:
    everything = np.array([*values.to_numpy(dtype=float), *(roof for roof in roofs if roof)])
    return float(everything.min() / _MARGIN), float(everything.max() * _MARGIN)


def devices(runs: Sequence[Run]) -> Figure:
    """Several runs under their own measured roofs: what each device does with the model that ran on it."""
    figure, axes = plt.subplots(figsize=(10, 6.4))
    tables = [measured(run) for run in runs]
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    roofs = [(run.document.ceilings["memory_bytes_per_s"], _own_peak(run)) for run in runs]
    everything = pd.concat(tables)
    x_low, x_high = _limits(everything["intensity"], *(peak / bandwidth for bandwidth, peak in roofs))
    y_low, y_high = _limits(everything["flops_per_s"], *(peak for _, peak in roofs))
    axes.set(xscale="log", yscale="log", xlim=(x_low, x_high), ylim=(y_low, y_high))
    for index, (run, cells, (bandwidth, peak)) in enumerate(zip(runs, tables, roofs, strict=True)):
        color, style = colors[index % len(colors)], LINE_STYLES[index % len(LINE_STYLES)][1]
        label = f"{title(run)}: {scaled(bandwidth, 'B/s')}, {scaled(peak, 'FLOP/s')}"
        _roof(axes, bandwidth, peak, x_low, x_high, color, style, label)
        for phase, shape in PHASE_STYLE.items():
            of_phase = cells[cells["phase"] == phase]
            axes.scatter(of_phase["intensity"], of_phase["flops_per_s"], color=color, marker=shape["marker"], s=30)
    for phase, shape in PHASE_STYLE.items():
        axes.plot([], [], color=_SHEET_COLOR, marker=shape["marker"], ls="", label=phase)
    axes.set_xlabel("arithmetic intensity, model FLOPs per model byte")
    axes.set_ylabel("achieved FLOP/s")
    axes.set_title("measured roofs and the cells under them")
    axes.legend(loc="lower right")
    return figure


def _own_peak(run: Run) -> float:
    """The compute roof of the run's own dtype, else the highest that was measured."""
    roofs = {name: float(roof["per_s"]) for name, roof in run.document.ceilings["compute"].items()}
    return roofs.get(run.document.model["dtype"], max(roofs.values()))
