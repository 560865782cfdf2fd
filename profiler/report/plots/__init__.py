"""Pictures of runs, drawn from their folders only; a new one is a function and a line in PLOTS."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from profiler.errors import RequestError, near_misses
from profiler.report.plots.charts import breakdown_chart, doubling, memory, regime_map, throughput, waterfall
from profiler.report.plots.roofline import operators, roofline
from profiler.report.plots.style import MOST_WIDTH_IN, styled
from profiler.store.folder import Run, replace_file

PLOTS: dict[str, Callable[..., Figure]] = {
    "roofline": roofline,
    "map": regime_map,
    "breakdown": breakdown_chart,
    "throughput": throughput,
    "doubling": doubling,
    "waterfall": waterfall,
    "operators": operators,
    "memory": memory,
}
"""Pictures of one run; `throughput` also draws several."""


def draw(runs: Sequence[Run], name: str, width_in: float = MOST_WIDTH_IN) -> Figure:
    """Return a figure of PLOTS in the project's style, of at most this width in inches; the caller closes it.

    Raises RequestError for an unknown name, several runs for a picture of one, and a run without a measured cell.
    """
    if name not in PLOTS:
        raise RequestError(f"no picture is called {name!r}; use {', '.join(PLOTS)}.{near_misses(name, PLOTS)}")
    for run in runs:
        if not run.measured:
            raise RequestError(f"{run.folder} has no cell with a number: there is nothing to draw.")
    if name != "throughput" and len(runs) > 1:
        raise RequestError(f"{name} is a picture of one run; only throughput draws several.")
    with styled(width_in):
        return PLOTS[name](*runs)


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
