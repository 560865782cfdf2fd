"""Which of a GPU's prices is used, and that no price of the table is an outlier."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterable, Sequence

import pytest

from profiler.data import prices
from profiler.data.datasheets import gpus
from profiler.data.prices import Price, PriceClass, prices_of


def price(
    usd_per_h: float, provider: str = "one", kind: PriceClass = "GPU cloud", *, spot: bool = False,
    date: str = "2026-10-01", cards: int = 1,
) -> Price:  # fmt: skip
    return Price("B200 SXM", provider, kind, usd_per_h, spot, price_date=date, machine_cards=cards)


def test_the_lowest_dated_price_of_each_size_of_host(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [price(6.0), price(5.0), price(1.0, spot=True), price(4.0, date=""), price(4.5, cards=8)]
    monkeypatch.setattr(prices, "prices", lambda: tuple(table))
    assert sorted(each.usd_per_h for each in prices_of("B200 SXM")) == [4.5, 5.0]
    assert [each.usd_per_h for each in prices_of("B200 SXM", 2)] == [4.5]
    assert [each.usd_per_h for each in prices_of("B200 SXM", 16)] == [4.5, 5.0][::-1]
    monkeypatch.setattr(prices, "prices", lambda: tuple(table[3:4]))
    assert prices_of("B200 SXM") == [table[3]]


def test_a_class_a_provider_and_spot_narrow_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [price(6.0, "Hyperstack"), price(7.0, "Lambda"), price(14.2, "AWS", "hyperscaler")]
    table.append(price(2.4, "Lambda", spot=True))
    monkeypatch.setattr(prices, "prices", lambda: tuple(table))
    assert prices_of("B200 SXM") == table[:1]
    assert prices_of("B200 SXM", price_class="hyperscaler") == table[2:3]
    assert prices_of("B200 SXM", provider="Lambda") == table[1:2]
    assert prices_of("B200 SXM", spot=True) == table[3:]
    assert prices_of("B200 SXM", price_class="hyperscaler", spot=True) == []


def test_prices_are_of_gpus_in_the_table_and_have_a_source() -> None:
    for each in prices.prices():
        assert each.card in {sheet.gpu for sheet in gpus()}
        assert each.price_source
        if each.price_date:
            datetime.date.fromisoformat(each.price_date)


def test_every_row_of_the_table_has_a_class() -> None:
    """AWS, Azure, GCP and OCI are the hyperscalers; RunPod has both a secure and a community cloud."""
    kinds: dict[str, set[PriceClass]] = {}
    for each in prices.prices():
        kinds.setdefault(each.provider, set()).add(each.price_class)
    assert {provider for provider, own in kinds.items() if "hyperscaler" in own} == {"AWS", "Azure", "GCP", "OCI"}
    assert {kind for own in kinds.values() for kind in own} == {"hyperscaler", "GPU cloud", "marketplace", "community"}
    assert kinds["RunPod"] == {"GPU cloud", "community"}
    assert all(len(own) == 1 for provider, own in kinds.items() if provider != "RunPod")


def implausible(price: Price, same_gpu: Sequence[Price]) -> str:
    """Return why a price cannot be that of a machine with this GPU; empty for a believable one.

    A host without its GPU costs a quarter of the whole machine. Believable prices of one class differ less than
    threefold, those of all classes fivefold, and spot prices of AWS go down to a tenth.
    """
    rates = [each for each in same_gpu if not each.spot]
    others = [each for each in rates if each.provider != price.provider]
    by_class = [_lowest(each for each in others if each.price_class == price.price_class), _lowest(others)]
    peers, factor = (by_class[0], 3) if len(by_class[0]) > 1 else (by_class[1], 5)
    if price.spot:
        own = [each.usd_per_h for each in rates if each.provider == price.provider]
        rate = max(own) if own else statistics.median(peers or [price.usd_per_h])
        return "" if rate / 20 <= price.usd_per_h <= rate else f"spot, and {rate} on demand"
    median = statistics.median(peers) if len(peers) > 1 else price.usd_per_h
    if not median / factor <= price.usd_per_h <= median * factor:
        return f"an outlier: others take {median}"
    community = [each.usd_per_h for each in rates if (each.provider, each.price_class) == (price.provider, "community")]
    return "the price of community hosts" if price.price_class == "GPU cloud" and price.usd_per_h in community else ""


def _lowest(table: Iterable[Price]) -> list[float]:
    """The lowest price of each provider."""
    from_the_highest = sorted(table, key=lambda each: each.usd_per_h, reverse=True)
    return list({each.provider: each.usd_per_h for each in from_the_highest}.values())


def test_no_price_of_the_table_is_an_outlier() -> None:
    for each in prices.prices():
        assert each.usd_per_h > 0
        assert not implausible(each, [other for other in prices.prices() if other.card == each.card]), each
