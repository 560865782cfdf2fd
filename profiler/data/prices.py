"""Rental prices: one row of prices.csv per GPU, provider and offer, with source and date."""

from __future__ import annotations

import csv
import datetime
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_name("prices.csv")
STALE_DAYS = 90
"""An older price is shown with its age."""


@dataclass(frozen=True)
class Price:
    """USD an hour for one card."""

    card: str
    """The row of gpus.csv."""
    provider: str
    usd_per_h: float
    spot: bool
    vcpus: float | None
    """A card."""
    region: str
    read_on: datetime.date | None
    """When it was read; None where its source does not say."""
    source: str
    cards: int = 1
    """Of the machine that it is rented with."""
    without: str = ""
    """What is billed on top, and not told; empty: it is the whole price."""

    def age_days(self, today: datetime.date) -> int | None:
        """Days since it was read."""
        return (today - self.read_on).days if self.read_on else None


@cache
def prices() -> tuple[Price, ...]:
    """All rows of prices.csv: the on-demand price, or the spot price where there is no other."""
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(_parse(row) for row in csv.DictReader(file))


def cheapest(card: str) -> Price | None:
    """The lowest price of a card; None: it has none.

    On demand where there is one, a whole price before one without its host, by itself where it can be had so, and of
    known date. Its age is told and chooses none: a day that passes changes no ranking.
    """

    def rank(price: Price) -> tuple[bool, bool, bool, bool, float]:
        return price.spot, bool(price.without), price.cards > 1, price.read_on is None, price.usd_per_h

    return min((price for price in prices() if price.card == card), key=rank, default=None)


def age_words(age_days: int | None) -> str:
    """`14 days old`, with a mark where that is long ago."""
    return "date not told" if age_days is None else f"{age_days} days old" + ("!" if age_days > STALE_DAYS else "")


def _parse(row: dict[str, str]) -> Price:
    on_demand = row["on_demand_usd_per_h"]
    return Price(
        row["card"],
        row["provider"],
        float(on_demand or row["spot_usd_per_h"]),
        not on_demand,
        float(row["vcpus"]) if row["vcpus"] else None,
        row["region"],
        datetime.date.fromisoformat(row["date"]) if row["date"] else None,
        row["source"],
        int(row["cards"] or 1),
        row["without"],
    )
