"""The picture of a measured link: time and bandwidth over the size of a message."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from profiler.data.links import Link, bus_share
from profiler.report.link import message_size
from profiler.report.plots.style import REGIME_COLOR
from profiler.units import duration, scaled

_GREY = "#666666"
_TICKS = tuple((1 << 10) * 8**power for power in range(6))
"""1 KiB to 32 MiB."""


def link_figure(link: Link) -> Figure:
    """Return time (left) and bus bandwidth (right) of an all-reduce over its bytes, with the fit.

    Raises ValueError for a link without measured messages.
    """
    if not link.points:
        raise ValueError(f"{link.name} has no measured messages")
    ranks, half_bytes = link.points[0].ranks, link.half_bytes(link.points[0].ranks)
    nbytes = np.array([point.nbytes for point in link.points])
    seconds = np.array([point.seconds for point in link.points])
    smooth = np.geomspace(nbytes.min(), nbytes.max(), 200)
    fitted_s = np.array([link.seconds("all_reduce", size, ranks) for size in smooth])
    share = bus_share("all_reduce", ranks)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4))
    left.plot(nbytes, seconds, "o", label="measured")
    left.plot(smooth, fitted_s, "-", color=_GREY, label="latency + bytes / bandwidth")
    left.axhline(link.alpha_s, color=_GREY, ls=":", label=f"latency: {duration(link.alpha_s)}")
    left.set(yscale="log", ylabel="time of an all-reduce")
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    left.yaxis.set_minor_formatter(NullFormatter())
    left.legend(loc="upper left")
    right.plot(nbytes, nbytes * share / seconds / 1e9, "o")
    right.plot(smooth, smooth * share / fitted_s / 1e9, "-", color=_GREY)
    limit = f"bandwidth: {scaled(link.bus_bytes_per_s, 'B/s')}"
    right.axhline(link.bus_bytes_per_s / 1e9, color=_GREY, ls=":", label=limit)
    right.set(ylabel="GB/s at each rank's link (busbw)")
    right.set_ylim(0, None)
    right.legend(loc="center left")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="message")
        axes.set_xticks(_TICKS, map(message_size, _TICKS))
        axes.minorticks_off()
        axes.axvspan(nbytes.min(), half_bytes, color=REGIME_COLOR["overhead-bound"], alpha=0.15, lw=0)
    figure.suptitle(
        f"{link.name}: messages below {message_size(half_bytes)} (shaded) wait for latency", x=0.01, ha="left"
    )
    return figure
