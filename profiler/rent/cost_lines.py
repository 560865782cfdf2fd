"""Cost per thousand requests over the rate, for the picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from profiler.predict.costs import CostLine, CostOverLoad, Span
from profiler.rent.command import RankedOffers
from profiler.rent.offers import Offer
from profiler.rent.words import assumptions, precision_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LINES = 5
_POINTS = 240
_BEYOND = 3.0
"""The picture ends at this factor of the largest capacity of one replica."""


def cost_over_load(rented: RankedOffers) -> CostOverLoad:
    """The cost over the rate of the first five ranked offers that may meet the limits, or unranked if none is."""
    serving = [offer for offer in rented.offers if offer.request_usd is not None and offer.meets != "no"]
    drawn = ([offer for offer in serving if not offer.price_mark] or serving)[:_MOST_LINES]
    if not drawn:
        return CostOverLoad(assumptions(rented), rented.request.load.rate_per_s, ())
    top = _BEYOND * max(offer.planned.capacity_per_s for offer in drawn)
    bottom = min(offer.planned.capacity_per_s for offer in drawn) / 30
    names = {offer.name for offer in drawn}
    several_engines = len({offer.engine for offer in drawn}) > 1
    lines = tuple(
        _line(offer, bottom, top, several_engines, offer.crossover_per_s if offer.crossover_from in names else None)
        for offer in drawn
    )
    return CostOverLoad(assumptions(rented), rented.request.load.rate_per_s, lines)


def cost_picture(rented: RankedOffers) -> Figure:
    """Draw USD per thousand requests over the requests per second, a line per offer of `cost_over_load`.

    Raises RequestError if no GPU fits with a price that is ranked.
    """
    from profiler.report.plots.costs import cost_figure  # matplotlib takes most of a second

    return cost_figure(cost_over_load(rented))


def _line(offer: Offer, bottom: float, top: float, with_engine: bool, crossover_per_s: float | None) -> CostLine:
    rates = np.geomspace(bottom, top, _POINTS).tolist()
    if crossover_per_s is not None and bottom < crossover_per_s < top:
        rates = sorted({*rates, crossover_per_s})
    spans = tuple(_span(offer, rate) for rate in rates)
    name = f"{offer.name}, {precision_words(offer.precision)}" + (f", {offer.engine}" if with_engine else "")
    return CostLine(name, offer.usd_per_h, tuple(rates), spans, crossover_per_s)


def _span(offer: Offer, rate_per_s: float) -> Span:
    """USD per thousand requests, with the replicas that the ends of the range need, and with the planned ones."""
    fast, _, slow = (1e3 * fleet.usd_per_request(rate_per_s) for fleet in offer.fleets)
    return Span(fast, 1e3 * offer.planned.usd_per_request(rate_per_s), slow)
