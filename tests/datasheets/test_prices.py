"""Which of a GPU's prices is shown, and which are left out of rankings."""

from __future__ import annotations

import datetime

import pytest

from profiler.data import prices
from profiler.data.prices import PRICE_CLASSES, STALE_DAYS, Price, PriceClass, impossible, mark, quote
from profiler.rent.command import rent, rent_request
from profiler.rent.workload import WORKLOADS

TODAY = datetime.date(2026, 11, 1)


def price(
    usd_per_h: float, *, cards: int = 1, age_days: int | None = 10, spot: bool = False, without: str = ""
) -> Price:
    read_on = None if age_days is None else TODAY - datetime.timedelta(days=age_days)
    return Price("T4", "one", usd_per_h, spot, None, "", read_on, "a page", cards, without)


@pytest.mark.parametrize(
    ("better", "other"),
    [
        (price(0.5), price(0.6)),
        (price(0.5), price(0.4, spot=True)),
        (price(0.5), price(0.4, cards=8)),
        (price(0.5), price(0.4, age_days=None)),
        (price(0.5), price(0.4, without="vCPU and RAM")),
        (price(0.5, cards=8), price(0.4, without="vCPU and RAM")),
    ],
    ids=["lower", "on demand", "by itself", "of a known day", "whole", "eight, but whole"],
)
def test_the_price_of_one_card_that_can_be_rented(better: Price, other: Price, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "prices", lambda: (other, better))
    found = quote("T4", better.kind, TODAY)
    assert found is not None
    assert found.price == better


def test_a_price_without_its_host_is_in_the_table_as_such() -> None:
    """TensorDock's starting rates are of the GPU only."""
    partial = [each for each in prices.prices() if each.without]
    assert {each.provider for each in partial} == {"TensorDock"}
    assert len(partial) == 11
    assert all(mark(each, [each], TODAY) == f"without {each.without}" for each in partial)


def test_rankings_change_only_when_a_price_becomes_stale() -> None:
    """AWS's prices are of 2026-07-20 and GCP's of 2026-08-03, so both are unmarked until 30 days after the first."""
    request = rent_request(WORKLOADS["batch"], cards="L4,L40S,A100 80GB SXM,H100 SXM")
    first = datetime.date(2026, 8, 3)
    answers = [rent("mistral-7b-v0.1", request, first + datetime.timedelta(days)) for days in (0, 10, 400)]
    orders = [[(offer.card, offer.usd_per_h, offer.verdict) for offer in each.offers] for each in answers]
    assert orders[0] == orders[1]
    assert {verdict for *_, verdict in orders[0]} <= {"cheapest", "typically cheapest", "cannot tell", "dearer"}
    assert {verdict for *_, verdict in orders[2]} == {"not ranked"}
    ages = [[offer.price_age_days for offer in each.offers] for each in answers]
    assert ages[0] != ages[1]


def offer(usd_per_h: float, provider: str, kind: PriceClass = "GPU cloud", *, spot: bool = False) -> Price:
    read_on = TODAY - datetime.timedelta(days=10)
    return Price("B200 SXM", provider, usd_per_h, spot, None, "", read_on, "a page", kind=kind)


B200 = [offer(6.0, "Hyperstack"), offer(6.99, "Lambda"), offer(7.15, "Nebius"), offer(8.6, "CoreWeave")]
"""On-demand rates of 2026-08 and 2026-09 (prices.csv)."""


@pytest.mark.parametrize(
    ("planted", "others", "reason"),
    [
        (offer(0.0, "Cudo"), B200, "a price of 0"),
        (offer(0.01, "Cudo"), B200, "an outlier"),
        # GCP's L4 is 0.7045 USD/h: 0.56 for the GPU, and for the host (4 vCPUs, 16 GB) 0.147.
        (offer(0.147, "GCP", "hyperscaler"), [offer(0.8048, "AWS", "hyperscaler"), offer(0.75, "OCI", "hyperscaler")],
         "an outlier"),
        (offer(8 * 6.99, "Lambda", spot=True), B200, "spot above the rate on demand of 6.99"),
        (offer(8 * 6.99, "Cudo", spot=True), B200, "spot above the rate on demand of 7.07"),
        (offer(5.98, "RunPod"), [*B200, offer(5.98, "RunPod", "community")], "the price of community hosts"),
        (offer(7.99, "RunPod"), [*B200, offer(5.98, "RunPod", "community")], ""),
        (offer(5.98, "RunPod", "community"), [*B200, offer(7.99, "RunPod")], ""),
        (offer(2.4, "Verda", spot=True), B200, ""),
    ],
    ids=["0", "0.01", "no GPU", "spot 8x own", "spot 8x others", "community as secure", "secure", "community", "spot"],
)  # fmt: skip
def test_a_planted_failure_is_never_quoted(
    planted: Price, others: list[Price], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures of other price tables: skypilot #3615 and #9156, skypilot-catalog #31, dstack #1890 and #1886."""
    assert impossible(planted, [*others, planted]).startswith(reason or " ") == bool(reason)
    monkeypatch.setattr(prices, "prices", lambda: (*others, planted))
    quoted = quote("B200 SXM", planted.kind, TODAY, spot=planted.spot, provider=planted.provider)
    assert (quoted is None) == bool(reason)


@pytest.mark.parametrize(
    ("marked", "words"),
    [
        (price(0.5, age_days=None), "no date"),
        (price(0.5, age_days=STALE_DAYS + 1), "31 days old"),
        (price(0.5, without="vCPU and RAM"), "without vCPU and RAM"),
        (price(0.5, age_days=STALE_DAYS), ""),
        (price(0.5, age_days=-1), "dated 2026-11-02, after today"),
    ],
)
def test_undated_stale_and_partial_prices_are_marked(marked: Price, words: str) -> None:
    assert mark(marked, [marked], TODAY) == words


def test_an_unmarked_price_is_quoted_before_a_lower_marked_one(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [price(0.5), price(0.1, age_days=31), price(0.1, age_days=None), price(0.1, without="RAM")]
    monkeypatch.setattr(prices, "prices", lambda: tuple(table))
    quoted = quote("T4", "GPU cloud", TODAY)
    assert quoted is not None
    assert (quoted.price.usd_per_h, quoted.mark) == (0.5, "")
    monkeypatch.setattr(prices, "prices", lambda: tuple(table[1:]))
    quoted = quote("T4", "GPU cloud", TODAY)
    assert quoted is not None
    assert quoted.mark == "31 days old"


def test_a_quote_is_of_one_class_one_term_and_one_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median is over providers, not over rows: three rows of one provider count once."""
    table = [*B200, offer(7.5, "Lambda"), offer(7.6, "Lambda"), offer(2.4, "Lambda", spot=True)]
    monkeypatch.setattr(prices, "prices", lambda: (*table, offer(14.24, "AWS", "hyperscaler")))
    quoted = quote("B200 SXM", "GPU cloud", TODAY)
    assert quoted is not None
    assert (quoted.price.usd_per_h, quoted.providers) == (6.0, 4)
    assert quoted.median_usd_per_h == pytest.approx((6.99 + 7.15) / 2)
    assert quote("B200 SXM", "hyperscaler", TODAY, spot=True) is None
    lambdas = quote("B200 SXM", "GPU cloud", TODAY, provider="lambda")
    assert lambdas is not None
    assert lambdas.price.usd_per_h == 6.99
    assert quote("B200 SXM", "community", TODAY) is None


def test_two_gpus_come_from_a_machine_that_has_two(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (price(0.5), price(0.6, cards=2), price(0.4, cards=8))
    monkeypatch.setattr(prices, "prices", lambda: table)
    quotes = [quote("T4", "GPU cloud", TODAY, gpus=gpus) for gpus in (1, 2, 4)]
    assert [quoted.price.cards for quoted in quotes if quoted] == [1, 2, 8]


def test_every_row_of_the_table_has_a_class() -> None:
    """AWS, Azure, GCP and OCI are the hyperscalers; RunPod has both a secure and a community cloud."""
    kinds: dict[str, set[PriceClass]] = {}
    for each in prices.prices():
        kinds.setdefault(each.provider, set()).add(each.kind)
    assert {provider for provider, own in kinds.items() if "hyperscaler" in own} == {"AWS", "Azure", "GCP", "OCI"}
    assert {kind for own in kinds.values() for kind in own} == set(PRICE_CLASSES)
    assert kinds["RunPod"] == {"GPU cloud", "community"}
    assert all(len(own) == 1 for provider, own in kinds.items() if provider != "RunPod")
