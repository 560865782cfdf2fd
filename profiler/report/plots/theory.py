"""Pictures of a counted grid: what the ceilings of GPUs allow, before anything runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator
from numpy.typing import NDArray

from profiler.counting.grid_count import GpuFloors, GridCount
from profiler.errors import RequestError
from profiler.report.blocks import evenly
from profiler.report.plots.roofline import INK, draw_ridge, frame, name_points, plot_ceiling, shade
from profiler.report.plots.style import PHASE_COLOR, PHASE_MARKER, Dashes, log_axes, panel_grid, phases_of
from profiler.report.roofline_data import CeilingLine
from profiler.report.selection import MOST_SIZES
from profiler.store.folder import Run, read_run
from profiler.units import scaled

_OTHER_DASHES: tuple[Dashes, ...] = (":", "-.", "--", (0, (3, 1, 1, 1, 1, 1)), (0, (1, 4)))


def theory_roofline(grid: GridCount, run: Run | None = None) -> Figure:
    """One panel per GPU: a ceiling per dtype, the ridge of the model's dtype, and the floor of every point.

    A point lies below the ceiling where some of its operators are bound by compute and others by memory. A dashed
    ceiling is what a healthy GPU sustains at its power limit, where the datasheets have it. `run` adds a run's measured
    cells.
    """
    figure, panels = panel_grid(len(grid.gpus), 7.4, 6.0, _title(grid) + ("; stars: measured" if run else ""))
    named = [_roofline_panel(axes, grid, gpu, run) for axes, gpu in zip(panels, grid.gpus, strict=True)]
    figure.draw_without_rendering()  # names need the places of points
    for axes, points in zip(panels, named, strict=True):
        name_points(axes, points)
    return figure


def _roofline_panel(axes: Axes, grid: GridCount, gpu: GpuFloors, run: Run | None) -> list[tuple[float, float, str]]:
    ceilings, points = gpu.ceilings, _points(grid, flops_per_s=grid.model_flops / gpu.floor_s)
    own = CeilingLine("measured", grid.dtype, ceilings.bytes_per_s, ceilings.peak(grid.dtype, grid.dtype))
    frame(axes, [own.ridge, *grid.intensity], [*points["flops_per_s"], *ceilings.flops_per_s.values()], "speed at most")
    shade(axes, own.ridge)
    # One line per rate, of the model's own dtype where it has it: float16 and bfloat16 mostly share theirs.
    by_rate: dict[float, str] = {}
    for dtype in sorted(ceilings.flops_per_s, key=lambda name: name != grid.dtype):
        by_rate.setdefault(ceilings.flops_per_s[dtype], dtype)
    for place, (rate, dtype) in enumerate(by_rate.items()):
        label = f"{dtype}: {scaled(rate, 'OP/s' if dtype.startswith('int') else 'FLOP/s')}"
        other = ("#888888", _OTHER_DASHES[place % len(_OTHER_DASHES)], 1.2)
        color, dashes, width = (INK, "-", 2.0) if rate == own.flops_per_s else other
        ceiling = CeilingLine("other", label, ceilings.bytes_per_s, rate)
        plot_ceiling(axes, ceiling, color=color, ls=dashes, lw=width, label=label)
    for dtype, rate in ceilings.sustained.items():
        label = f"{dtype}, sustained: {scaled(rate, 'FLOP/s')}"
        plateau = CeilingLine("other", label, ceilings.bytes_per_s, rate, has_slope=False)
        plot_ceiling(axes, plateau, color=INK, ls="--", lw=1.6, label=label)
    draw_ridge(axes, own)
    ends: list[tuple[float, float, str]] = []
    for phase, color in PHASE_COLOR.items():
        of_phase = points[points["phase"] == phase]
        if len(of_phase):
            at = of_phase["intensity"], of_phase["flops_per_s"]
            axes.plot(*at, PHASE_MARKER[phase], color=color, mec="white", ms=7, label=phase)
            names = of_phase["batch_size"].astype(str) + " x " + of_phase["depth"].astype(str)
            by_speed = sorted(zip(of_phase["flops_per_s"], of_phase["intensity"], names, strict=True))
            ends += [(intensity, speed, name) for speed, intensity, name in dict.fromkeys([by_speed[0], by_speed[-1]])]
        if cells := [cell for cell in (run.measured if run else ()) if cell.phase == phase]:
            x, y = [cell.intensity for cell in cells], [cell.flops_per_s for cell in cells]
            axes.plot(x, y, "*", color=color, mec="black", ms=11, label=f"{phase}, measured")
    axes.set_title(f"{ceilings.name}: {scaled(ceilings.bytes_per_s, 'B/s')}", fontsize=11)
    # Below the axes, where it hides neither a ceiling nor the ridge's name.
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.11), fontsize=9, ncols=3, frameon=False)
    return ends


def _points(grid: GridCount, **figures: NDArray[np.float64] | list[str]) -> pd.DataFrame:
    names = ("batch_size", "prompt_len", "context_len", "depth", "intensity")
    columns = {name: getattr(grid, name) for name in names}
    return pd.DataFrame({"phase": list(grid.phases), **columns, **figures})


def theory_kv(grid: GridCount) -> Figure:
    """Weights, KV cache and workspace against the length: a line per batch size, a panel per GPU."""
    figure, panels = panel_grid(max(1, len(grid.gpus)), 7.4, 5.2, _title(grid))
    if not grid.gpus:
        _need_lines(panels[0], grid, grid.needs_bytes)
    for axes, gpu in zip(panels, grid.gpus, strict=False):
        axes.axhline(gpu.ceilings.room_bytes, color="#D55E00", lw=1, ls="--")
        _line_name(axes, gpu.ceilings.room_bytes, f"free memory of {gpu.ceilings.device}", "#D55E00", va="bottom")
        _need_lines(axes, grid, gpu.need.peak_bytes, gpu.ceilings.room_bytes)
        axes.set_title(gpu.ceilings.device, fontsize=11)
    return figure


def _need_lines(axes: Axes, grid: GridCount, needs_bytes: NDArray[np.float64], room_bytes: float = 0) -> None:
    """Draw what steps need. A name outside the limits would move the picture, so they include the free memory."""
    points = _points(grid, needs_bytes=needs_bytes)
    points = points[points["phase"] == phases_of(points)[-1]]
    named = points.assign(line="batch " + points["batch_size"].astype(str))
    sns.lineplot(named, x="depth", y="needs_bytes", hue="line", style="line", markers=True, errorbar=None, ax=axes)
    axes.axhline(grid.weight_bytes, color="#888888", lw=1)
    _line_name(axes, grid.weight_bytes, "weights", "black", va="top")
    depths = evenly(sorted(set(points["depth"].tolist())), MOST_SIZES)
    log_axes(axes, depths, "tokens per sequence", "weights, KV cache and workspace")
    low, high = 0.9 * grid.weight_bytes, 1.2 * max(room_bytes, points["needs_bytes"].max())
    axes.set_ylim(low, high)
    # A range of less than a decade gets evenly spaced marks.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if high > 10 * low else MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: scaled(value, "B")))
    axes.legend(title=None, fontsize=9, loc="upper left")


def _line_name(axes: Axes, nbytes: float, name: str, color: str, va: Literal["top", "bottom"]) -> None:
    axes.annotate(name, (1.01, nbytes), xycoords=("axes fraction", "data"), va=va, color=color)


def _title(grid: GridCount) -> str:
    quant = "" if grid.quant == "none" else f", {grid.quant}"
    return f"{grid.model}, {grid.dtype}{quant}: counted, not measured"


_PLOTS: dict[str, Callable[[GridCount], Figure]] = {"roofline": theory_roofline, "kv": theory_kv}


def draw_grid(grid: GridCount, name: str, request: str, add: str, run: Path | None = None) -> Figure:
    """Return the picture `roofline` or `kv` of a counted grid, the first also with the cells of the run in a folder.

    Raises RequestError for a roofline without a GPU: `request` is what the reader wrote, and `add` adds a GPU there.
    """
    if name == "roofline" and not grid.gpus:
        raise RequestError(f"{request} needs a GPU: add {add}, or several (`roofscope gpus` lists them).")
    return theory_roofline(grid, read_run(run)) if run is not None else _PLOTS[name](grid)
