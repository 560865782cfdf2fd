"""Which of a card's prices is told."""

from __future__ import annotations

import datetime

import pytest

from profiler.machine import prices
from profiler.machine.prices import Price, cheapest

TODAY = datetime.date(2026, 11, 1)


def price(usd_per_h: float, *, cards: int = 1, age_days: int | None = 10, spot: bool = False) -> Price:
    read_on = None if age_days is None else TODAY - datetime.timedelta(days=age_days)
    return Price("T4", "one", usd_per_h, spot, None, "", read_on, "a page", cards)


@pytest.mark.parametrize(
    ("better", "others"),
    [
        (price(0.5), [price(0.6)]),
        (price(0.5), [price(0.1, spot=True)]),
        (price(0.5), [price(0.1, cards=8)]),
        (price(0.5), [price(0.1, age_days=None), price(0.2, age_days=91)]),
        (price(0.5, age_days=91), [price(0.1, cards=8)]),
        (price(0.5, cards=8), [price(0.1, spot=True)]),
    ],
    ids=["lower", "on demand", "by itself", "read lately", "old but by itself", "eight at once, but on demand"],
)
def test_the_price_of_one_card_that_can_be_rented(
    better: Price, others: list[Price], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prices, "prices", lambda: (*others, better))
    assert cheapest("T4", TODAY) == better
