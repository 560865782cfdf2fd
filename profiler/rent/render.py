"""Print the offers of `rent` as sentences and tables, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from profiler.data.prices import OWN, STALE_DAYS
from profiler.json_document import Document
from profiler.predict.costs import Span
from profiler.rent.command import RankedOffers
from profiler.rent.offers import UTILISATIONS, Offer, Ranking
from profiler.rent.words import CLASSES, assumptions, precision_words, price_words, rate_words
from profiler.rent.workload import Limits, Workload
from profiler.report.blocks import Lines, Sentences, TextTable, text_table
from profiler.report.terminal import print_blocks
from profiler.units import duration, percent, several, significant

RENT_COLUMNS = ("GPUs", "as", "engine", "USD/h", "GPUs x load", "TTFT", "ms per token", "USD per 1000", "idle/day")
LOAD_COLUMNS = ("GPUs", "as", "engine", *(percent(share) for share in UTILISATIONS), "J/token", "cheaper above")
_MARKS: dict[Ranking, str] = {
    "cheapest": "> ", "typically cheapest": "> ", "cannot tell": "? ", "too slow": "! ", "not ranked": "- "
}  # fmt: skip
_MOST_ROWS = 16
_MOST_UNFIT = 6


def rent_sentences(rented: RankedOffers) -> list[str]:
    """The assumptions, then the cheapest offer, the fastest, and where the doubt is and what removes it."""
    return [assumptions(rented), _cheapest(rented), _fastest(rented), _doubt(rented), *rented.notes]


def _serving(rented: RankedOffers) -> list[Offer]:
    return [offer for offer in rented.offers if offer.request_usd is not None and offer.meets != "no"]


def _named(offer: Offer) -> str:
    """Such as `2 x H100 SXM in 16 bits`."""
    return f"{offer.name} in {precision_words(offer.precision)}"


def _usd_per_thousand(offer: Offer) -> str:
    assert offer.request_usd is not None
    span = offer.request_usd.times(1e3)
    text = f"{_usd(span.typical)} USD per thousand requests"
    return text if span.low == span.high else f"{text} ({_span(span)})"


def _cheapest(rented: RankedOffers) -> str:
    serving = _serving(rented)
    ranked = [offer for offer in serving if not offer.price_mark]
    certain = next((offer for offer in ranked if offer.meets == "yes"), None)
    if certain is not None and rented.request.load.limits == Limits():
        return f"Cheapest: {_named(certain)}, {_deal(certain)}."
    if certain is not None:
        return f"Cheapest that certainly meets the limits: {_named(certain)}, {_deal(certain)}."
    if ranked:
        return f"None certainly meets the limits; typically cheapest: {_named(ranked[0])}, {_deal(ranked[0])}."
    able = "can run the model" if rented.request.load.limits == Limits() else "may meet the limits"
    return (
        f"Not ranked: no GPU that {able} has a price of yours, or a whole one of the last {STALE_DAYS} days"
        f" ({price_words(rented.request)}). By the prices below, {_named(serving[0])} would be the cheapest,"
        f" {_deal(serving[0])}; give today's with --price."
    )


def _deal(offer: Offer) -> str:
    """Provider, price, cost per request, and utilisation."""
    assert offer.utilisation is not None
    rented = several(offer.rented_gpus, "GPU", "GPUs")
    at = f"{rented} at {percent(offer.utilisation.typical)} utilisation, " if offer.utilisation.typical != 1 else ""
    whose = "your price of" if offer.provider == OWN else offer.provider
    return f"{whose} {significant(offer.usd_per_h, 3)} USD/h per GPU, {at}{_usd_per_thousand(offer)}"


def _fastest(rented: RankedOffers) -> str:
    if rented.request.load.rate_per_s is None:
        fastest = max(_serving(rented), key=lambda offer: offer.tokens_per_s.typical if offer.tokens_per_s else 0.0)
        assert fastest.tokens_per_s is not None
        speed = f"{significant(fastest.tokens_per_s.typical, 2)} output tokens/s"
        return f"Fastest: {_named(fastest)}, {speed}, {_usd_per_thousand(fastest)}."
    fastest = min(_serving(rented), key=lambda offer: offer.tpot_s.typical if offer.tpot_s else 0.0)
    assert fastest.tpot_s is not None
    return f"Fastest: {_named(fastest)}, {duration(fastest.tpot_s.typical)} per token, {_usd_per_thousand(fastest)}."


def _doubt(rented: RankedOffers) -> str:
    unsure = [offer for offer in rented.offers if offer.verdict == "cannot tell"]
    unranked = [offer for offer in rented.offers if offer.verdict == "not ranked"]
    parts = []
    if unsure:
        first = unsure[0]
        why = "may miss the limits" if first.meets == "cannot tell" else "its range overlaps"
        parts.append(
            f"{several(len(unsure), 'other row', 'other rows')} may be cheaper, first {_named(first)} ({why});"
            f" `roofscope ceilings --out gpu.json` on one {first.card} takes a minute and narrows it"
        )
    if unranked:
        parts.append(
            f"{several(len(unranked), 'row has', 'rows have')} a marked price (-) and no rank; today's price decides:"
            f" --price '{unranked[0].card}=USD_PER_HOUR'"
        )
    return f"In doubt: {'; '.join(parts)}." if parts else "In doubt: nothing; no range overlaps the cheapest."


def _span(span: Span, between: str = " to ") -> str:
    return f"{_usd(span.low)}{between}{_usd(span.high)}"


def _usd(value: float) -> str:
    """Two significant digits, but at most three decimals."""
    return significant(value, 2) if value >= 0.1 else f"{value:.3f}"


def rent_table(offers: Sequence[Offer]) -> TextTable:
    """Return a row per offer that fits, typical but for the ranges of times and costs."""
    rows = []
    for offer in offers:
        if offer.ttft_s is None or offer.tpot_s is None or offer.request_usd is None or offer.utilisation is None:
            continue
        usd = offer.request_usd.times(1e3)
        price = significant(offer.usd_per_h, 3)
        if offer.median_usd_per_h != offer.usd_per_h:
            price += f" ({significant(offer.median_usd_per_h, 3)})"
        rows.append(
            (
                _MARKS.get(offer.verdict, "  ") + offer.name,
                precision_words(offer.precision),
                offer.engine,
                price,
                f"{offer.rented_gpus} x {percent(offer.utilisation.typical)}",
                duration(offer.ttft_s.typical),
                _span(offer.tpot_s.times(1e3), ".."),
                _usd(usd.typical) if usd.low == usd.high else _span(usd, ".."),
                significant(offer.idle_usd_per_day, 2),
            )
        )
    return _table(RENT_COLUMNS, rows, wrapped=("GPUs", "as"))


def load_table(offers: Sequence[Offer]) -> TextTable:
    """Return a row per offer that fits: typical USD per million tokens in and out, energy, and crossover."""
    rows = []
    for offer in offers:
        if not offer.costs:
            continue
        crossing = "-"
        if offer.crossover_from:
            at = "never" if offer.crossover_per_s is None else rate_words(offer.crossover_per_s)
            crossing = f"{at} ({offer.crossover_from})"
        joules = offer.joules_per_token_at_most
        rows.append(
            (
                offer.name,
                precision_words(offer.precision),
                offer.engine,
                *(f"{_usd(c.input.typical)} / {_usd(c.output.typical)}" for c in offer.costs),
                "-" if joules is None else f"<= {significant(joules, 2)}",
                crossing,
            )
        )
    return _table(LOAD_COLUMNS, rows, wrapped=("GPUs", "as", "cheaper above"))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], wrapped: Sequence[str]) -> TextTable:
    """A table without the precision or engine that all rows share: the first sentence names it."""
    shown = [
        place
        for place, name in enumerate(headings)
        if name not in ("as", "engine") or len({row[place] for row in rows}) > 1
    ]
    names = [headings[place] for place in shown]
    return text_table(
        names, [[row[place] for place in shown] for row in rows], wrapped=[name for name in wrapped if name in names]
    )


def _price(offer: Offer) -> str:
    words = [offer.provider, "spot" if offer.spot else "", offer.region]
    if offer.machine_cards > 1:
        words.append(f"only {offer.machine_cards} at once")
    if offer.provider != OWN:
        words.append(offer.price_mark or f"{offer.price_age_days} days old")
    return f"{offer.card} {significant(offer.usd_per_h, 3)} ({', '.join(word for word in words if word)})"


def print_rented(rented: RankedOffers, console: Console) -> None:
    """Print the assumptions, the answer, the GPUs that fit, their costs by utilisation, and why others do not fit."""
    fitting = tuple(offer for offer in rented.offers if offer.request_usd is not None)
    unfit = [offer for offer in rented.offers if offer.request_usd is None]
    shown = fitting[:_MOST_ROWS]
    marks = [
        "USD/h: the lowest of the class (median). GPUs x load: how many, and their utilisation. USD per 1000: requests."
        " idle/day: USD per day without a request. Ranges hold nine in ten.",
        "> cheapest, ? may be cheaper (cannot tell), ! misses a limit, - not ranked: its price is marked below",
        "",
    ]
    omitted = len(fitting) - len(shown)
    notes = [f"USD per GPU and hour: {'; '.join(dict.fromkeys(map(_price, shown)))}"]
    notes += [
        f"{CLASSES[other.price_class]}, not ranked against these: {_named(other)}, {_deal(other)}"
        for other in rented.other_classes
    ]
    without = {(offer.precision, offer.engine): offer.why for offer in unfit if offer.verdict == "no basis"}
    notes += [
        f"{precision_words(form)} with {engine} engines has no row: {why}; another --engine may have one"
        for (form, engine), why in without.items()
    ]
    too_large = [offer for offer in unfit if offer.verdict != "no basis"]
    notes += [f"{_named(offer)} with {offer.engine}: {offer.why}" for offer in too_large[:_MOST_UNFIT]]
    notes += [f"{len(too_large) - _MOST_UNFIT} more rows do not fit"] if len(too_large) > _MOST_UNFIT else []
    bases = sorted(dict.fromkeys(offer.basis for offer in shown), key=len, reverse=True)
    notes += [basis for number, basis in enumerate(bases) if not any(basis in longer for longer in bases[:number])]
    blocks = [
        Sentences(rent_sentences(rented), plain_from=1),
        rent_table(shown),
        Lines(marks, "dim"),
        Lines(
            ["Typical USD per million tokens in / out by utilisation; cheaper above: the load at which rankings cross:"]
        ),
        load_table(shown),
        Lines([f"{omitted} more rows: --format json has them all"] if omitted else []),
        Lines(notes, "dim"),
    ]
    print_blocks(blocks, console)


@dataclass(frozen=True)
class RentDocument(Document):
    """`roofscope rent --format json`."""

    model: str
    assumptions: str
    """The load, limits, engines, precisions and prices as one sentence."""
    load: Workload
    batch: int | None
    """Sequences always in flight, in place of a rate."""
    engines: Sequence[str]
    quants: Sequence[str]
    price_class: str
    provider: str
    spot: bool
    stale_days: int
    """The age above which a price is not ranked."""
    host_index: float | None
    """The host's dispatch time over the reference; null: that with which each GPU is mostly rented."""
    cards: Sequence[Offer]
    other_classes: Sequence[Offer]
    """The cheapest offer of each other class, not ranked against `cards`."""
    notes: Sequence[str]


def rent_document(rented: RankedOffers) -> RentDocument:
    """Return the document of the offers of a model, with every assumption."""
    request = rented.request
    return RentDocument(
        rented.model, assumptions(rented), request.load, request.batch, request.engines, request.quants,
        request.price_class, request.provider, request.spot, STALE_DAYS, request.host_index, rented.offers,
        rented.other_classes, rented.notes,
    )  # fmt: skip
