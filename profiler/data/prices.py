"""Rental prices: one row of prices.csv per GPU, provider and size of host, with class, source and date."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from functools import cache
from typing import Literal

from profiler.data import rows_of

OWN = "yours"
"""The provider of a price that the user gave."""
PriceClass = Literal["hyperscaler", "GPU cloud", "marketplace", "community", "own"]
"""Who rents a GPU out. hyperscaler: AWS, Azure, GCP and OCI; GPU cloud: data centres that mostly rent GPUs;
marketplace: hosts of many owners (Akash, Vast.ai); community: private hosts of a GPU cloud (RunPod Community Cloud);
own: a price that the user gave."""


@dataclass(frozen=True)
class Price:
    """The price of one GPU in USD per hour."""

    card: str
    """The row of gpus.csv."""
    provider: str
    """Who rents it at that price."""
    price_class: PriceClass
    """The kind of provider."""
    usd_per_h: float
    """Of one GPU."""
    spot: bool = False
    """Whether the GPU can be taken away at any time."""
    region: str = ""
    """Where the price holds; empty if the source does not say."""
    price_date: str = ""
    """ISO date of the price; empty if the source has none."""
    price_source: str = ""
    """The file or page of the price."""
    machine_cards: int = 1
    """GPUs of the host, which is rented as a whole."""
    vcpus: float | None = None
    """Per GPU."""

    def age_days(self, today: datetime.date) -> int | None:
        """Return the days since `price_date`; None without a date."""
        return (today - datetime.date.fromisoformat(self.price_date)).days if self.price_date else None


@cache
def prices() -> tuple[Price, ...]:
    """Return all prices of prices.csv, on demand and spot."""
    return rows_of("prices.csv", Price)


def prices_of(
    card: str, gpus: int = 1, *, price_class: str = "", provider: str = "", spot: bool = False
) -> list[Price]:
    """Return the lowest price for each size of host that has `gpus` of this GPU (or else for smaller hosts).

    Prices without a date count only if there are no others. `price_class` and `provider` narrow the choice.
    """
    found = [
        price
        for price in prices()
        if (price.card, price.spot) == (card, spot)
        and price_class in ("", price.price_class)
        and provider in ("", price.provider)
    ]
    found = [price for price in found if price.machine_cards >= gpus] or found
    found = [price for price in found if price.price_date] or found
    dearest_first = sorted(found, key=lambda price: price.usd_per_h, reverse=True)
    return list({price.machine_cards: price for price in dearest_first}.values())
