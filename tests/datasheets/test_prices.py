"""Which of a card's prices is shown."""

from __future__ import annotations

import datetime

import pytest

from profiler.data import prices
from profiler.data.prices import Price, cheapest
from profiler.rent.command import RentRequest, rent

TODAY = datetime.date(2026, 11, 1)


def price(
    usd_per_h: float, *, cards: int = 1, age_days: int | None = 10, spot: bool = False, without: str = ""
) -> Price:
    read_on = None if age_days is None else TODAY - datetime.timedelta(days=age_days)
    return Price("T4", "one", usd_per_h, spot, None, "", read_on, "a page", cards, without)


@pytest.mark.parametrize(
    ("better", "others"),
    [
        (price(0.5), [price(0.6)]),
        (price(0.5), [price(0.1, spot=True)]),
        (price(0.5), [price(0.1, cards=8)]),
        (price(0.5, age_days=500), [price(0.1, age_days=None)]),
        (price(0.5, age_days=91), [price(0.1, cards=8)]),
        (price(0.5), [price(0.1, without="vCPU and RAM")]),
        (price(0.5, cards=8), [price(0.1, without="vCPU and RAM")]),
        (price(0.5, without="vCPU and RAM"), [price(0.1, spot=True)]),
        (price(0.5, cards=8), [price(0.1, spot=True)]),
    ],
    ids=[
        "lower",
        "on demand",
        "by itself",
        "of a known day",
        "old but by itself",
        "whole",
        "eight, but whole",
        "in part, but on demand",
        "eight at once, but on demand",
    ],
)
def test_the_price_of_one_card_that_can_be_rented(
    better: Price, others: list[Price], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prices, "prices", lambda: (*others, better))
    assert cheapest("T4") == better


def test_a_price_without_its_host_is_in_the_table_as_such() -> None:
    """TensorDock's starting rates are of the GPU only; none of them is a card's price if another is whole."""
    partial = [each for each in prices.prices() if each.without]
    assert {each.provider for each in partial} == {"TensorDock"}
    assert len(partial) == 11
    for each in partial:
        chosen = cheapest(each.card)
        assert chosen is not None
        assert not chosen.without


def test_rankings_do_not_change_from_day_to_day() -> None:
    """A price of more than 90 days was once replaced by another, and rankings changed by themselves."""
    cards = "L4,L40S,A100 80GB SXM,H100 SXM"
    answers = [
        rent("mistral-7b-v0.1", RentRequest(cards=cards), TODAY + datetime.timedelta(days)) for days in (0, 40, 400)
    ]
    orders = {tuple((offer.card, offer.usd_per_h, offer.verdict) for offer in each.offers) for each in answers}
    assert len(orders) == 1
    ages = [[offer.price_age_days for offer in each.offers] for each in answers]
    assert ages[0] != ages[1]
