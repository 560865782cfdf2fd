"""Which of a GPU's prices is used, and that no price of the table is an outlier."""

from __future__ import annotations

import datetime
import statistics

import pytest

from profiler.data import prices
from profiler.data.datasheets import gpus
from profiler.data.prices import Price, newest_prices


def price(usd_per_h: float, date: str = "2026-10-01", provider: str = "one") -> Price:
    return Price("B200 SXM", provider, usd_per_h, price_date=date)


def test_the_newest_price_and_of_one_day_the_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [price(4.0, ""), price(4.5, "2026-09-30"), price(6.0), price(5.0, provider="two"), price(5.5)]
    for listed in (table, table[::-1]):
        monkeypatch.setattr(prices, "prices", lambda listed=listed: tuple(listed))
        assert newest_prices() == {"B200 SXM": table[3]}
    monkeypatch.setattr(prices, "prices", lambda: (price(4.2, ""), table[0]))
    assert newest_prices() == {"B200 SXM": table[0]}, "undated ones only where there is no other"


def test_prices_are_of_gpus_in_the_table_and_have_a_source() -> None:
    for each in prices.prices():
        assert each.gpu in {sheet.gpu for sheet in gpus()}
        assert each.price_source
        if each.price_date:
            datetime.date.fromisoformat(each.price_date)


def test_no_price_of_the_table_is_an_outlier() -> None:
    """A machine without its GPU costs a quarter of the whole. Prices of one GPU differ less than fivefold."""
    for each in prices.prices():
        same_gpu = [other for other in prices.prices() if other.gpu == each.gpu]
        others = [other.usd_per_h for other in same_gpu if other.provider != each.provider]
        median = statistics.median(others) if len(others) > 1 else each.usd_per_h
        assert 0 < median / 5 <= each.usd_per_h <= 5 * median, each
