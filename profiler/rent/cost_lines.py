"""Cost per thousand requests over the rate, for the picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from profiler.predict.costs import CostLine, CostOverLoad, Span
from profiler.rent.command import RankedOffers, precision_words
from profiler.rent.offers import Offer
from profiler.rent.sentences import assumptions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LINES = 5
_POINTS = 240
_BEYOND = 3.0
"""The picture ends at this factor of the largest capacity of one replica."""


def cost_over_load(rented: RankedOffers) -> CostOverLoad:
    """The cost over the rate of the first five offers that may meet the limits."""
    drawn = [offer for offer in rented.offers if offer.fits and offer.meets != "no"][:_MOST_LINES]
    capacities = [offer.planned.capacity_per_s for offer in drawn]
    rates = np.geomspace(min(capacities) / 30, _BEYOND * max(capacities), _POINTS).tolist() if drawn else []
    names = {offer.name for offer in drawn}
    several_engines = len({offer.engine for offer in drawn}) > 1
    lines = tuple(
        _line(offer, rates, several_engines, offer.crossover_per_s if offer.crossover_from in names else None)
        for offer in drawn
    )
    return CostOverLoad(assumptions(rented), rented.request.load.rate_per_s, lines)


def cost_picture(rented: RankedOffers) -> Figure:
    """Draw USD per thousand requests over the requests per second, a line per offer of `cost_over_load`.

    Raises RequestError if no GPU may meet the limits.
    """
    from profiler.report.plots.costs import cost_figure  # matplotlib takes most of a second

    return cost_figure(cost_over_load(rented))


def _line(offer: Offer, rates: list[float], with_engine: bool, crossover_per_s: float | None) -> CostLine:
    if crossover_per_s is not None and rates[0] < crossover_per_s < rates[-1]:
        rates = sorted({*rates, crossover_per_s})
    name = f"{offer.name}, {precision_words(offer.precision)}" + (f", {offer.engine}" if with_engine else "")
    return CostLine(
        name, offer.usd_per_h, tuple(rates), tuple(_usd_per_thousand(offer, rate) for rate in rates), crossover_per_s
    )


def _usd_per_thousand(offer: Offer, rate_per_s: float) -> Span:
    """With the replicas that the ends of the range need, and with the planned ones."""
    fast, _, slow = (1e3 * fleet.usd_per_request(rate_per_s) for fleet in offer.fleets)
    return Span(fast, 1e3 * offer.planned.usd_per_request(rate_per_s), slow)
