"""What a model costs on rented GPUs over the load, as a picture."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from profiler.errors import RequestError
from profiler.rent.command import RentDocument, precision_words
from profiler.rent.serving import Fleet
from profiler.units import significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LINES = 5
_POINTS = 240
_BEYOND = 3.0
"""The picture ends at this factor of the largest capacity of one replica."""
_TITLE_CHARACTERS = 105


def cost_picture(rented: RentDocument) -> Figure:
    """Draw USD per thousand requests over the requests per second, a line per offer that may meet the limits, up to 5.

    A line falls while a GPU has idle time, and jumps where another GPU is needed. Raises RequestError if no GPU may
    meet the limits.
    """
    import matplotlib.pyplot as plt  # it takes most of a second

    from profiler.report.plots.style import LINE_STYLES, STYLE_FILE, log_ticks

    drawn = [offer for offer in rented.cards if offer.capacity_per_s and offer.meets != "no"][:_MOST_LINES]
    if not drawn:
        raise RequestError("no GPU meets the limits: there is nothing to draw.")
    spans = [offer.capacity_per_s for offer in drawn if offer.capacity_per_s]
    planned = [span.low if offer.meets == "yes" else span.typical for offer, span in zip(drawn, spans, strict=True)]
    rates = np.geomspace(min(planned) / 30, _BEYOND * max(planned), _POINTS)
    several_engines = len({offer.engine for offer in drawn}) > 1
    with plt.style.context(STYLE_FILE):
        figure, axes = plt.subplots(figsize=(8, 5))
        for offer, span, capacity_per_s, style in zip(drawn, spans, planned, LINE_STYLES, strict=False):
            usd, low, high = (
                [1e3 * fleet.usd_per_request(rate) for rate in rates]
                for fleet in (
                    Fleet(each, offer.gpus, offer.machine_cards, offer.usd_per_h)
                    for each in (capacity_per_s, span.high, span.low)
                )
            )
            engine = f", {offer.engine}" if several_engines else ""
            label = f"{offer.name}, {precision_words(offer.precision)}{engine}, {offer.usd_per_h:.2f} USD/h"
            [line] = axes.plot(rates, usd, ls=style.dashes, label=label)
            axes.fill_between(rates, low, high, color=line.get_color(), alpha=0.10, lw=0)
        requested_per_s = rented.load.rate_per_s
        if requested_per_s is not None:
            axes.axvline(requested_per_s, color="0.4", lw=0.9, ls=":")
        axes.set(xscale="log", yscale="log", xlabel="requests per second", ylabel="USD per thousand requests")
        for axis in (axes.xaxis, axes.yaxis):
            log_ticks(axis, lambda value: significant(value, 1))
        axes.legend(fontsize=8)
        dotted = "" if requested_per_s is None else ", dotted: the requested rate"
        title = textwrap.fill(rented.assumptions, _TITLE_CHARACTERS)
        axes.set_title(f"{title}\nbands: nine in ten, steps: one more GPU{dotted}", fontsize=9, loc="left")
    return figure
