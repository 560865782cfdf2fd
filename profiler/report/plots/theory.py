"""Pictures of a counted grid: what the roofs of GPUs allow, before anything runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator
from numpy.typing import NDArray

from profiler.grid.cells import PHASES, Phase
from profiler.report.blocks import evenly
from profiler.report.plots.style import (
    LINE_STYLES,
    PHASE_STYLE,
    REGIME_COLOR,
    Dashes,
    depth_label,
    log_ticks,
    panels_in_a_row,
)
from profiler.report.selection import MOST_SIZES
from profiler.store.folder import Run
from profiler.units import duration, scaled, significant

if TYPE_CHECKING:
    from profiler.counting.grid_count import GpuFloors, GridCount

_NO_ROOM = "#BBBBBB"
_OTHER_DASHES: tuple[Dashes, ...] = (":", "-.", "--", (0, (3, 1, 1, 1, 1, 1)), (0, (1, 4)))
_MARGIN = 3.0
_APART = 1.8
"""A point is labelled if its intensity is this many times that of the last labelled one: nearer labels overlap."""


def theory_roofline(grid: GridCount, run: Run | None = None) -> Figure:
    """One panel per GPU: a ceiling per dtype, the ridge of the model's dtype, and the floor of every point.

    A point lies below the roof where some of its operators are bound by compute and others by memory. A dashed ceiling
    is what a healthy GPU sustains at its power limit, where the datasheets have it. `run` adds a run's measured cells.
    """
    heading = _title(grid) + ("; stars: measured" if run else "")
    figure, panels = panels_in_a_row(len(grid.gpus), 7.4, 6.0, heading)
    for axes, gpu in zip(panels, grid.gpus, strict=True):
        _roofline_panel(axes, grid, gpu, run)
    return figure


def _roofline_panel(axes: Axes, grid: GridCount, gpu: GpuFloors, run: Run | None) -> None:
    roofs, achieved = gpu.roofs, grid.model_flops / gpu.floor_s
    peak = roofs.peak(grid.dtype, grid.dtype)
    ridge = peak / roofs.bytes_per_s
    low = min(float(grid.intensity.min()), ridge) / _MARGIN
    high = max(float(grid.intensity.max()), ridge) * _MARGIN
    bottom, top = float(achieved.min()) / _MARGIN, max(roofs.flops_per_s.values()) * _MARGIN
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top))
    axes.axvspan(low, ridge, color=REGIME_COLOR["memory-bound"], alpha=0.12, lw=0)
    axes.axvspan(ridge, high, color=REGIME_COLOR["compute-bound"], alpha=0.12, lw=0)
    axes.text(low * 1.15, top / 1.6, "memory-bound", fontsize=9, va="top")
    axes.text(high / 1.15, top / 1.6, "compute-bound", fontsize=9, va="top", ha="right")
    x = np.geomspace(low, high, 200)
    for place, (dtype, rate) in enumerate(_distinct(roofs.flops_per_s, grid.dtype).items()):
        own = rate == peak
        label = f"{dtype}: {scaled(rate, 'OP/s' if dtype.startswith('int') else 'FLOP/s')}"
        axes.plot(
            x,
            np.minimum(x * roofs.bytes_per_s, rate),
            color="#222222" if own else "#888888",
            ls="-" if own else _OTHER_DASHES[place % len(_OTHER_DASHES)],
            lw=2 if own else 1.2,
            label=label,
        )
    for dtype, rate in roofs.sustained.items():
        label = f"{dtype}, sustained: {scaled(rate, 'FLOP/s')}"
        axes.plot([rate / roofs.bytes_per_s, high], [rate, rate], color="#222222", ls="--", lw=1.6, label=label)
    axes.axvline(ridge, color="#222222", lw=0.8, ls=":")
    text = f"ridge {ridge:.3g} FLOP/byte "
    axes.text(ridge / 1.03, bottom * 1.3, text, rotation=90, fontsize=9, ha="right", va="bottom")
    for phase in PHASES:
        _points(axes, grid, achieved, phase, ridge)
    if run is not None:
        _measured(axes, run)
    axes.set_xlabel("arithmetic intensity, model FLOPs per model byte")
    axes.set_ylabel("FLOP/s at most")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value, 1)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: scaled(value, "", 1)))
    axes.set_title(f"{roofs.name}: {scaled(roofs.bytes_per_s, 'B/s')}", fontsize=11)
    axes.legend(loc="lower right", fontsize=8)


def _distinct(rates: Mapping[str, float], own: str) -> dict[str, float]:
    """One dtype per rate, the model's own first: float16 and bfloat16 mostly share theirs."""
    found: dict[float, str] = {}
    for dtype in sorted(rates, key=lambda name: name != own):
        found.setdefault(rates[dtype], dtype)
    return {dtype: rate for rate, dtype in found.items()}


def _points(axes: Axes, grid: GridCount, achieved: NDArray[np.float64], phase: Phase, ridge: float) -> None:
    mine = [number for number, other in enumerate(grid.phases) if other == phase]
    if not mine:
        return
    style = PHASE_STYLE[phase]
    axes.plot(grid.intensity[mine], achieved[mine], style.marker, color=style.color, mec="white", ms=7, label=phase)
    ordered = sorted(mine, key=lambda number: float(grid.intensity[number]))
    labelled: list[int] = []
    for number in ordered:
        if not labelled or grid.intensity[number] > _APART * grid.intensity[labelled[-1]]:
            labelled.append(number)
    for place, number in enumerate(labelled):
        on_slope = phase == "decode" or grid.intensity[number] < ridge
        axes.annotate(
            f"{grid.batch_size[number]} x {grid.depth[number]}",
            (grid.intensity[number], achieved[number]),
            xytext=(7, -9) if on_slope else (0, 8 if place % 2 else -14),
            textcoords="offset points",
            ha="left" if on_slope else "center",
            fontsize=8,
            color=style.color,
        )


def _measured(axes: Axes, run: Run) -> None:
    for phase in PHASES:
        cells = [cell for cell in run.measured if cell.phase == phase]
        if cells:
            x = [cell.intensity for cell in cells]
            y = [cell.flops_per_s for cell in cells]
            axes.plot(x, y, "*", color=PHASE_STYLE[phase].color, mec="black", ms=11, label=f"{phase}, measured")


def theory_map(grid: GridCount) -> Figure:
    """The side that binds each point, over batch and length: a row of panels per GPU, a column per phase."""
    figure, panels = _panels_of_gpus(grid, 6.4, 4.2)
    for axes, gpu, phase in panels:
        _map_panel(axes, grid, gpu, phase)
    return figure


def _panels_of_gpus(grid: GridCount, width: float, height: float) -> tuple[Figure, list[tuple[Axes, GpuFloors, Phase]]]:
    """A figure with a row of panels per GPU, and a column per phase."""
    phases = [phase for phase in PHASES if phase in grid.phases]
    size = (width * len(phases), 0.6 + height * len(grid.gpus))
    figure, panels = plt.subplots(len(grid.gpus), len(phases), figsize=size, squeeze=False)
    figure.suptitle(_title(grid), x=0.01, ha="left", fontsize=12)
    places = itertools.product(grid.gpus, phases)
    return figure, [(axes, gpu, phase) for axes, (gpu, phase) in zip(panels.flat, places, strict=True)]


def _map_panel(axes: Axes, grid: GridCount, gpu: GpuFloors, phase: Phase) -> None:
    batches, depths, at = _places(grid, phase)
    for number, (column, row) in at.items():
        bound = str(gpu.bound[number])
        color = REGIME_COLOR[f"{bound}-bound"] if gpu.fits[number] else _NO_ROOM
        word = "no room" if not gpu.fits[number] else f"{bound}\n(tight)" if gpu.tight[number] else bound
        axes.add_patch(Rectangle((column, row), 1, 1, fc=color, ec="white", lw=1))
        axes.text(column + 0.5, row + 0.5, word, ha="center", va="center", fontsize=8)
    _map_axes(axes, batches, depths, phase)
    axes.set_title(f"{phase}, {gpu.roofs.name}", fontsize=11)


def _places(grid: GridCount, phase: Phase) -> tuple[list[int], list[int], dict[int, tuple[int, int]]]:
    """The batch sizes and lengths that a map shows, and the (column, row) of each point among them."""
    mine = [number for number, other in enumerate(grid.phases) if other == phase]
    batches = evenly(sorted({int(grid.batch_size[number]) for number in mine}), MOST_SIZES)
    depths = evenly(sorted({int(grid.depth[number]) for number in mine}), MOST_SIZES)
    at = {
        number: (depths.index(int(grid.depth[number])), batches.index(int(grid.batch_size[number])))
        for number in mine
        if grid.depth[number] in depths and grid.batch_size[number] in batches
    }
    return batches, depths, at


def _map_axes(axes: Axes, batches: list[int], depths: list[int], phase: Phase) -> None:
    axes.set(xlim=(0, len(depths)), ylim=(0, len(batches)), xlabel=depth_label(phase), ylabel="batch")
    axes.set_xticks([place + 0.5 for place in range(len(depths))], [str(depth) for depth in depths])
    axes.set_yticks([place + 0.5 for place in range(len(batches))], [str(batch) for batch in batches])
    axes.grid(visible=False)


def theory_intensity(grid: GridCount) -> Figure:
    """The arithmetic intensity over batch and length, one panel per phase; it needs no GPU."""
    phases = [phase for phase in PHASES if phase in grid.phases]
    figure, panels = panels_in_a_row(len(phases), 6.4, 4.8, _title(grid))
    norm = LogNorm(float(grid.intensity.min()), float(max(grid.intensity.max(), 1.01 * grid.intensity.min())))
    for axes, phase in zip(panels, phases, strict=True):
        batches, depths, at = _places(grid, phase)
        values = np.full((len(batches), len(depths)), np.nan)
        for number, (column, row) in at.items():
            values[row, column] = grid.intensity[number]
            axes.text(
                column + 0.5, row + 0.5, significant(grid.intensity[number], 2), ha="center", va="center", fontsize=8,
                bbox={"fc": "white", "alpha": 0.6, "lw": 0, "pad": 1},
            )  # fmt: skip
        image = axes.pcolormesh(values, norm=norm, cmap="viridis")
        _map_axes(axes, batches, depths, phase)
        axes.set_title(phase, fontsize=11)
        bar = figure.colorbar(image, ax=axes, label="FLOP/byte")
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value, 1)))
    return figure


def theory_latency(grid: GridCount) -> Figure:
    """The floor of each step against the batch, a line per length and a panel per GPU and phase."""
    figure, panels = _panels_of_gpus(grid, 6.0, 4.4)
    for axes, gpu, phase in panels:
        _lines(axes, grid, phase, np.where(gpu.fits, gpu.floor_s, np.nan))
        axes.set(ylabel="time at least", title=f"{phase}, {gpu.roofs.name}")
        log_ticks(axes.yaxis, duration)
    return figure


def _lines(axes: Axes, grid: GridCount, phase: Phase, values: NDArray[np.float64]) -> None:
    mine = np.array([other == phase for other in grid.phases])
    for place, depth in enumerate(evenly(sorted({int(each) for each in grid.depth[mine]}), len(LINE_STYLES))):
        here = mine & (grid.depth == depth)
        order = np.argsort(grid.batch_size[here])
        style = LINE_STYLES[place]
        x, y = grid.batch_size[here][order], values[here][order]
        axes.plot(x, y, marker=style.marker, ls=style.dashes, label=f"{depth} {depth_label(phase)}")
    axes.set(xscale="log", yscale="log", xlabel="batch")
    _size_ticks(axes, grid.batch_size[mine])
    axes.legend(fontsize=8)


def _size_ticks(axes: Axes, sizes: Sequence[int]) -> None:
    """Mark the counted sizes on the x axis."""
    shown = evenly(sorted({int(size) for size in sizes}), MOST_SIZES)
    axes.set_xticks(shown, [str(size) for size in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def theory_kv(grid: GridCount) -> Figure:
    """Weights, KV cache and workspace against the length: a line per batch size, a panel per GPU with its room."""
    figure, panels = panels_in_a_row(max(1, len(grid.gpus)), 7.4, 5.2, _title(grid))
    if not grid.gpus:
        _need_lines(panels[0], grid, grid.needs_bytes)
    for axes, gpu in zip(panels, grid.gpus, strict=False):
        if gpu.roofs.room_bytes is not None:
            axes.axhline(gpu.roofs.room_bytes, color="#D55E00", lw=1, ls="--")
            _line_name(axes, gpu.roofs.room_bytes, f"room on {gpu.roofs.device}", "#D55E00", va="bottom")
        _need_lines(axes, grid, gpu.need.peak_bytes, gpu.roofs.room_bytes or 0)
        axes.set_title(gpu.roofs.device, fontsize=11)
    return figure


def _need_lines(axes: Axes, grid: GridCount, needs_bytes: NDArray[np.float64], room_bytes: int = 0) -> None:
    """Draw what steps need. A line's name outside the limits would move the picture, so they include the room."""
    mine = np.array([phase == ("decode" if "decode" in grid.phases else "prefill") for phase in grid.phases])
    for place, batch in enumerate(evenly(sorted({int(each) for each in grid.batch_size[mine]}), len(LINE_STYLES))):
        here = mine & (grid.batch_size == batch)
        order = np.argsort(grid.depth[here])
        style = LINE_STYLES[place]
        x, y = grid.depth[here][order], needs_bytes[here][order]
        axes.plot(x, y, marker=style.marker, ls=style.dashes, label=f"batch {batch}")
    axes.axhline(grid.weight_bytes, color="#888888", lw=1)
    _line_name(axes, grid.weight_bytes, "weights", "black", va="top")
    axes.set(xscale="log", yscale="log", xlabel="tokens per sequence", ylabel="weights, KV cache and workspace")
    axes.set_ylim(0.9 * grid.weight_bytes, 1.2 * max(room_bytes, needs_bytes[mine].max()))
    _size_ticks(axes, grid.depth[mine])
    log_ticks(axes.yaxis, lambda value: scaled(value, "B", 3))
    axes.legend(fontsize=8, loc="upper left")


def _line_name(axes: Axes, nbytes: float, name: str, color: str, va: Literal["top", "bottom"]) -> None:
    """Name a horizontal line at its right end, above or below it."""
    axes.annotate(name, (1.0, nbytes), xycoords=("axes fraction", "data"), ha="right", va=va, color=color)


def _title(grid: GridCount) -> str:
    quant = "" if grid.quant == "none" else f", {grid.quant}"
    return f"{grid.model}, {grid.dtype}{quant}: counted, not measured"


THEORY_PLOTS: dict[str, Callable[[GridCount], Figure]] = {
    "roofline": theory_roofline,
    "map": theory_map,
    "intensity": theory_intensity,
    "latency": theory_latency,
    "kv": theory_kv,
}
"""Pictures of `count --plot`. All but `intensity` and `kv` need a GPU."""
NEED_GPU = frozenset({"roofline", "map", "latency"})
