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
    """The price of one card in USD per hour."""

    card: str
    """The row of gpus.csv."""
    provider: str
    usd_per_h: float
    spot: bool
    vcpus: float | None
    """Per card."""
    region: str
    read_on: datetime.date | None
    """Date of the price; None if the source has none."""
    source: str
    cards: int = 1
    """Number of cards of the machine that must be rented whole."""
    without: str = ""
    """What costs extra, at a price not given; empty if this is the whole price."""

    def age_days(self, today: datetime.date) -> int | None:
        """Return the days since `read_on`; None without a date."""
        return (today - self.read_on).days if self.read_on else None


@cache
def prices() -> tuple[Price, ...]:
    """Return all rows of prices.csv, with the on-demand price, or else the spot price."""
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(_parse(row) for row in csv.DictReader(file))


def cheapest(card: str) -> Price | None:
    """Return the preferred price of a card; None if it has none.

    On-demand prices come before spot, whole prices before those with extras, single cards before machines with
    several, dated before undated, then the lowest. The age does not count: the choice must not change from day to day.
    """

    def rank(price: Price) -> tuple[bool, bool, bool, bool, float]:
        return price.spot, bool(price.without), price.cards > 1, price.read_on is None, price.usd_per_h

    return min((price for price in prices() if price.card == card), key=rank, default=None)


def age_words(age_days: int | None) -> str:
    """Return such as `14 days old`, with `!` above STALE_DAYS."""
    return "date unknown" if age_days is None else f"{age_days} days old" + ("!" if age_days > STALE_DAYS else "")


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
