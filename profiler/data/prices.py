"""Rental prices: one row of prices.csv per GPU, provider and offer, with class, source and date."""

from __future__ import annotations

import csv
import datetime
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

_TABLE = Path(__file__).with_name("prices.csv")
STALE_DAYS = 30
"""An older price is marked and left out of rankings."""
OWN = "yours"
"""The provider of a price that the user gave."""

PriceClass = Literal["hyperscaler", "GPU cloud", "marketplace", "community"]
"""Who rents a GPU out. hyperscaler: AWS, Azure, GCP and OCI; GPU cloud: data centres that mostly rent GPUs;
marketplace: hosts of many owners (Akash, Vast.ai); community: private hosts of a GPU cloud (RunPod Community
Cloud)."""
PRICE_CLASSES: tuple[PriceClass, ...] = get_args(PriceClass)


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
    kind: PriceClass = "GPU cloud"

    def age_days(self, today: datetime.date) -> int | None:
        """Return the days since `read_on`; None without a date."""
        return (today - self.read_on).days if self.read_on else None


@dataclass(frozen=True)
class Quote:
    """The lowest price of a GPU among the offers of a class, and the median of the class."""

    price: Price
    median_usd_per_h: float
    """Median over providers, each by its lowest price for machines of the same size."""
    providers: int
    mark: str
    """Why the price is left out of rankings (see `mark`); empty if it is ranked."""


@cache
def prices() -> tuple[Price, ...]:
    """Return all prices of prices.csv, on demand and spot."""
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(price for row in csv.DictReader(file) for price in _parse(row))


def quote(
    card: str, kind: PriceClass, today: datetime.date, *, spot: bool = False, provider: str = "", gpus: int = 1
) -> Quote | None:
    """Return the lowest price of a GPU in a class, on demand or spot, from any provider or one; None without a match.

    Unmarked prices come before marked ones, and machines with `gpus` GPUs before smaller and larger ones. An
    impossible price (`impossible`) is never quoted.
    """
    same_gpu = [price for price in prices() if price.card == card]
    chosen = [
        price
        for price in same_gpu
        if price.kind == kind
        and price.spot == spot
        and provider.lower() in ("", price.provider.lower())
        and not impossible(price, same_gpu)
    ]
    if not chosen:
        return None
    marks = {price: mark(price, same_gpu, today) for price in chosen}

    def group(price: Price) -> tuple[bool, bool, bool, bool, bool]:
        several = price.cards > gpus
        return bool(marks[price]), bool(price.without), price.read_on is None, price.cards < gpus, several

    best = min(map(group, chosen))
    alike = [price for price in chosen if group(price) == best]
    shown = min(alike, key=lambda price: price.usd_per_h)
    lowest = _lowest_by_provider(alike)
    return Quote(shown, statistics.median(lowest.values()), len(lowest), marks[shown])


def mark(price: Price, same_gpu: Iterable[Price], today: datetime.date) -> str:
    """Return why a price is not ranked: it is impossible, partial, undated or stale. Empty for a ranked price.

    `same_gpu` are all prices of its GPU.
    """
    if reason := impossible(price, list(same_gpu)):
        return reason
    if price.without:
        return f"without {price.without}"
    age_days = price.age_days(today)
    if age_days is None:
        return "no date"
    if age_days < 0:
        return f"dated {price.read_on}, after today"
    return f"{age_days} days old" if age_days > STALE_DAYS else ""


_OUTLYING = 3.0
"""Factor between a price and the median of its class beyond which it is not believed; `_OUTLYING_ANY` of other classes.

A host without its GPU costs a quarter of the whole machine. Within a class, believable prices differ less than this."""
_OUTLYING_ANY = 5.0
_DEEPEST_SPOT = 20.0
"""The largest discount of a spot price that is believed, as a factor. Spot prices of AWS go down to a tenth."""
_LEAST_PEERS = 2


def impossible(price: Price, same_gpu: Sequence[Price]) -> str:
    """Return why a price cannot be that of a machine with this GPU. Empty for a believable price.

    A price of 0, an outlier among other providers, a spot price above the on-demand rate, or a GPU cloud's price that
    is its community price. `same_gpu` are all prices of the GPU.
    """
    if price.usd_per_h <= 0:
        return "a price of 0"
    others = [other for other in same_gpu if other.provider != price.provider and not other.spot]
    own_rates = [other.usd_per_h for other in same_gpu if other.provider == price.provider and not other.spot]
    peers = list(_lowest_by_provider(other for other in others if other.kind == price.kind).values())
    factor = _OUTLYING
    if len(peers) < _LEAST_PEERS:
        peers, factor = list(_lowest_by_provider(others).values()), _OUTLYING_ANY
    if price.spot:
        rate = max(own_rates) if own_rates else statistics.median(peers) if peers else price.usd_per_h
        if price.usd_per_h > rate:
            return f"spot above the rate on demand of {rate:g}"
        return f"an outlier: on demand {rate:g}" if price.usd_per_h * _DEEPEST_SPOT < rate else ""
    if len(peers) >= _LEAST_PEERS:
        median = statistics.median(peers)
        if not median / factor <= price.usd_per_h <= median * factor:
            return f"an outlier: other providers' median is {median:g}"
    community = [
        other.usd_per_h
        for other in same_gpu
        if other.provider == price.provider and other.kind == "community" and other.spot == price.spot
    ]
    return "the price of community hosts" if price.kind == "GPU cloud" and price.usd_per_h in community else ""


def _lowest_by_provider(prices: Iterable[Price]) -> dict[str, float]:
    """The lowest positive price of each provider."""
    lowest: dict[str, float] = {}
    for price in prices:
        if price.usd_per_h > 0:
            lowest[price.provider] = min(price.usd_per_h, lowest.get(price.provider, price.usd_per_h))
    return lowest


def _parse(row: dict[str, str]) -> list[Price]:
    """The on-demand and the spot price of a row."""
    kind = next(kind for kind in PRICE_CLASSES if kind == row["class"])
    return [
        Price(
            row["card"],
            row["provider"],
            float(row[column]),
            spot,
            float(row["vcpus"]) if row["vcpus"] else None,
            row["region"],
            datetime.date.fromisoformat(row["date"]) if row["date"] else None,
            row["source"],
            int(row["cards"] or 1),
            row["without"],
            kind,
        )
        for column, spot in (("on_demand_usd_per_h", False), ("spot_usd_per_h", True))
        if row[column]
    ]
