"""What all pictures share: Okabe and Ito's colours, which the colour-blind tell apart, names, and the run's title."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from profiler.record.run import Run

STYLE_FILE = Path(__file__).parent / "roofscope.mplstyle"

# Markers differ as well, so that colour never carries meaning alone.
PHASE_STYLE: dict[str, dict[str, Any]] = {
    "prefill": {"color": "#D55E00", "marker": "^", "label": "prefill"},
    "decode": {"color": "#0072B2", "marker": "o", "label": "decode"},
}
LINE_STYLES = [("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-")]
REGIME_COLOR = {
    "memory-bound": "#56B4E9",
    "compute-bound": "#E69F00",
    "overhead-bound": "#CC79A7",
    "mixed": "#F0E442",
    "inconclusive": "#DDDDDD",
}
TERM_STYLE = {
    "weights_s": ("#0072B2", ""),
    "kv_s": ("#56B4E9", "//"),
    "compute_s": ("#E69F00", ""),
    "dequantise_s": ("#009E73", "oo"),
    "kernel_s": ("#D55E00", "\\\\"),
    "avoidable_s": ("#F0E442", ""),
    "dispatch_s": ("#CC79A7", ".."),
    "unexplained_s": ("#999999", "xx"),
}
"""Colour and hatch of each term of a split."""


def measured(run: Run) -> pd.DataFrame:
    """The cells that have a number."""
    found: pd.DataFrame = run.cells[run.cells["status"] == "ok"]
    return found


def first_engine(run: Run) -> pd.DataFrame:
    """Those of them that the run's first engine stepped."""
    cells = measured(run)
    found: pd.DataFrame = cells[cells["engine"] == run.document.engine["names"][0]]
    return found


def depth_column(phase: str) -> str:
    """The column that says how deep a cell is."""
    return "prompt_len" if phase == "prefill" else "context_len"


def cell_name(row: dict[Any, Any]) -> str:
    """`decode 1 x 64`: phase, batch, and prompt or context."""
    return f"{row['phase']} {row['batch_size']} x {row['prompt_len'] or row['context_len']}"


def title(run: Run) -> str:
    """Model, precision and device."""
    return f"{run.document.model['id']}, {precision(run)}, on {run.document.device['name']}"


def precision(run: Run) -> str:
    """`bfloat16`, or `bfloat16, nf4`."""
    model = run.document.model
    quant = "" if model["quant"] == "none" else f", {model['quant']}"
    return f"{model['dtype']}{quant}"


def log_axes(axes: Axes, sizes: list[int], xlabel: str, ylabel: str) -> None:
    """Two logarithmic axes with plain numbers; the sizes that were measured are the marks of the first."""
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
