"""Style shared by all charts: Okabe and Ito's colour-blind safe colours, fonts, axes and titles."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from profiler.grid.cells import Phase
from profiler.judge.breakdown import TERMS
from profiler.judge.regimes import LIMITS
from profiler.patching import switched
from profiler.store.folder import Run

STYLE_FILE = Path(__file__).parent / "roofscope.mplstyle"
# Fonts with the characters of Chinese, Japanese and Korean names, which matplotlib's own lacks.
_WIDE_FONTS = re.compile("CJK|Noto Sans SC|WenQuanYi|Droid Sans Fallback|YaHei|PingFang|Hiragino|Arial Unicode")
_MOST_TITLE = 100
Dashes = str | tuple[int, tuple[float, ...]]


PHASE_COLOR: dict[Phase, str] = {"prefill": "#D55E00", "decode": "#0072B2"}
PHASE_MARKER: dict[Phase, str] = {"prefill": "^", "decode": "o"}
REGIME_COLOR: dict[str, str] = {
    **{label: TERMS[limit.terms[0]].color for label, limit in LIMITS.items()},
    "link-bound": "#009E73",
    "mixed": "#F0E442",
    "inconclusive": "#999999",
}
MOST_WIDTH_IN = 15.0
WIDTH_IN = ContextVar("WIDTH_IN", default=MOST_WIDTH_IN)
"""The width in inches that pictures fit into."""


@contextmanager
def styled(width_in: float = MOST_WIDTH_IN, /, **settings: str) -> Iterator[None]:
    """Apply the project's style, a width in inches that panels fit into, and installed fonts with wide characters.

    A character that no font has is an empty box in a PNG; matplotlib's warning per character is suppressed.
    """
    wide = {font.name for font in fontManager.ttflist if _WIDE_FONTS.search(font.name)}
    families = ["sans-serif", *sorted(wide)]  # matplotlib takes glyphs that the first font lacks from the others
    look = plt.style.context([STYLE_FILE, {"font.family": families, **settings}])
    with look, switched(WIDTH_IN.set, width_in, WIDTH_IN.get()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        yield


def phases_of(cells: pd.DataFrame) -> list[Phase]:
    """Return the phases that have cells, in the order of panels."""
    return [phase for phase in PHASE_COLOR if (cells["phase"] == phase).any()]


def title(run: Run) -> str:
    """Return model, precision and device, cut to the length of a title."""
    text = f"{run.model.id}, {run.model.precision}, on {run.document.device.name}"
    return text if len(text) <= _MOST_TITLE else f"{text[:_MOST_TITLE]}..."


def panel_grid(panels: int, width: float, height: float, heading: str) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels of this size in inches, row by row, and a heading at the left.

    A row has as many as fit into the width of `styled`, and a single one that is too wide is narrowed.
    """
    most_in = WIDTH_IN.get()
    columns = int(max(1, min(panels, most_in // width)))
    rows, width = -(-panels // columns), min(width, most_in)
    figure, grid = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=12)
    for axes in list(grid.flat)[panels:]:
        axes.set_visible(False)
    return figure, list(grid.flat)[:panels]


def log_axes(axes: Axes, sizes: Sequence[int], xlabel: str, ylabel: str) -> None:
    """Make both axes logarithmic, with plain numbers; the ticks of the x-axis are `sizes`."""
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.set_xticks(list(sizes), [str(size) for size in sizes], minor=False)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
