"""Rental prices: one row of prices.csv per GPU and provider, on demand and for a single GPU, with source and date."""

from dataclasses import dataclass
from functools import cache

from profiler.data import rows_of

OWN = "yours"
"""The provider of a price that the user gave."""


@dataclass(frozen=True)
class Price:
    """The price of one GPU in USD per hour."""

    gpu: str
    """The row of gpus.csv."""
    provider: str
    """Who rents it out at that price."""
    usd_per_h: float
    """On demand."""
    region: str = ""
    """Where the price holds; empty if the source does not say."""
    price_date: str = ""
    """ISO date of the price; empty if the source has none."""
    price_source: str = ""
    """The file or page of the price."""


@cache
def prices() -> tuple[Price, ...]:
    return rows_of("prices.csv", Price)


def newest_prices() -> dict[str, Price]:
    """Return the newest price of each GPU, and of one day the lowest; one without a date only where none has one."""
    found: dict[str, Price] = {}
    for price in sorted(prices(), key=lambda price: -price.usd_per_h):
        if price.gpu not in found or price.price_date >= found[price.gpu].price_date:
            found[price.gpu] = price
    return found
