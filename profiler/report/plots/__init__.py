"""Pictures of runs, drawn from their folders only; a new one is a function and a line in PLOTS."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from profiler.errors import RequestError, near_misses
from profiler.report.plots.curves import depth_chart, doubling, precisions, steps, throughput
from profiler.report.plots.maps import breakdown_chart, intensity_map, regime_map
from profiler.report.plots.roofline import devices, operators, roofline
from profiler.report.plots.style import styled
from profiler.report.plots.theory import NEED_GPU
from profiler.report.plots.waterfall import engines
from profiler.store.folder import Run
from profiler.store.writer import replace_file

if TYPE_CHECKING:
    from profiler.counting.grid_count import GridCount

PLOTS: dict[str, Callable[[Run], Figure]] = {
    "roofline": roofline,
    "operators": operators,
    "split": breakdown_chart,
    "map": regime_map,
    "intensity": intensity_map,
    "throughput": throughput,
    "depth": depth_chart,
    "doubling": doubling,
    "steps": steps,
    "engines": engines,
}
"""Pictures of one run."""

COMPARISONS: dict[str, Callable[[Sequence[Run]], Figure]] = {
    "precisions": precisions,
    "devices": devices,
}
"""Pictures of several runs."""


def draw(runs: Sequence[Run], name: str) -> Figure:
    """Return a figure of PLOTS or COMPARISONS in the project's style; the caller closes it.

    Raises RequestError for an unknown name, several runs for a picture of one, and a run without a measured cell.
    """
    names = (*PLOTS, *COMPARISONS)
    if name not in names:
        raise RequestError(f"no picture is called {name!r}; use {', '.join(names)}.{near_misses(name, names)}")
    for run in runs:
        if not run.measured:
            raise RequestError(f"{run.folder} has no cell with a number: there is nothing to draw.")
    if name in PLOTS and len(runs) > 1:
        raise RequestError(f"{name} is a picture of one run; {' and '.join(COMPARISONS)} compare several.")
    with styled():
        return COMPARISONS[name](runs) if name in COMPARISONS else PLOTS[name](runs[0])


def save(runs: Sequence[Run], name: str, path: Path) -> None:
    """Draw a picture and save it. Raises the errors of `draw` and `save_figure`."""
    save_figure(draw(runs, name), path)


def check_gpus(grid: GridCount, name: str, asked: str, add: str) -> None:
    """Raise RequestError if a picture of THEORY_PLOTS needs a GPU and the counted grid has none.

    `asked` is how the reader asked for the picture, and `add` is what adds a GPU there.
    """
    if name in NEED_GPU and not grid.gpus:
        raise RequestError(f"{asked} needs a GPU: add {add}, or several (`roofscope gpus` lists them).")


def save_figure(figure: Figure, path: Path) -> None:
    """Save a figure as PNG or SVG, by the file's ending, and close it. An interrupted write leaves no partial file.

    Raises RequestError for another ending, and RunError for a file that cannot be written.
    """
    drawn = io.BytesIO()
    try:
        if path.suffix.lower() not in (".png", ".svg"):
            raise RequestError(f"--out {path}: the name must end in .png or .svg.")
        with styled():
            figure.savefig(drawn, format=path.suffix.lower().lstrip("."), bbox_inches="tight")
    finally:
        plt.close(figure)
    replace_file(path, drawn.getvalue())
