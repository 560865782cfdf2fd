"""Print the offers of `rent` as sentences and tables, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from profiler.data.prices import OWN
from profiler.json_document import Document
from profiler.rent.command import RankedOffers, precision_words
from profiler.rent.offers import UTILISATIONS, Offer, Ranking
from profiler.rent.sentences import assumptions, rent_sentences, usd_words
from profiler.rent.workload import Workload
from profiler.report.blocks import Block, Lines, Sentences, TextTable, text_table
from profiler.report.terminal import print_block, print_blocks
from profiler.units import percent, significant

_MARKS: dict[Ranking, str] = {"cheapest": "> ", "typically cheapest": "> ", "cannot tell": "? ", "too slow": "! "}


def rent_table(offers: Sequence[Offer]) -> TextTable:
    """Return a row per offer that fits: its price with provider and date, GPUs, times, and cost."""
    headings = ("GPU", "as", "USD/h", "from", "read on", "GPUs", "TTFT", "ms/token", "cost")
    rows = []
    for offer in offers:
        assert offer.ttft_s is not None
        assert offer.tpot_s is not None
        assert offer.request_usd is not None
        rows.append(
            (
                _MARKS.get(offer.verdict, "  ") + offer.name,
                _as(offer, offers),
                significant(offer.usd_per_h, 3) + _host(offer),
                offer.provider,
                offer.price_date or ("-" if offer.provider == OWN else "undated"),
                str(offer.rented_gpus),
                significant(1e3 * offer.ttft_s.typical, 2),
                f"{significant(1e3 * offer.tpot_s.low, 2)}..{significant(1e3 * offer.tpot_s.high, 2)}",
                "..".join(
                    dict.fromkeys(usd_words(1e3 * end) for end in (offer.request_usd.low, offer.request_usd.high))
                ),
            )
        )
    return _table(headings, rows)


def _host(offer: Offer) -> str:
    """GPUs and price of the host on a line of its own; empty for a host of one GPU."""
    cards = offer.machine_cards
    return f"\n{cards}: {significant(cards * offer.usd_per_h, 3)}" if cards > 1 else ""


def _as(offer: Offer, offers: Sequence[Offer]) -> str:
    """The precision, and the engine where offers have different ones."""
    engine = f", {offer.engine}" if len({each.engine for each in offers}) > 1 else ""
    return precision_words(offer.precision) + engine


def load_table(offers: Sequence[Offer]) -> TextTable:
    """Return a row per offer that fits: typical USD per million tokens in and out, energy, and crossover."""
    headings = ("GPU", "as", "load", *map(percent, UTILISATIONS), "J/token", "cheaper above")
    rows = []
    for offer in offers:
        assert offer.utilisation is not None
        crossing = "-"
        if offer.crossover_from:
            at = "never" if offer.crossover_per_s is None else f"{significant(offer.crossover_per_s, 2)}/s"
            crossing = f"{at} ({offer.crossover_from})"
        rows.append(
            (
                offer.name,
                _as(offer, offers),
                percent(offer.utilisation.typical),
                *(f"{usd_words(cost.input.typical)} / {usd_words(cost.output.typical)}" for cost in offer.costs),
                f"<= {significant(offer.joules_per_token_at_most or 0.0, 2)}",
                crossing,
            )
        )
    return _table(headings, rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> TextTable:
    """A table without the precision and engine that all rows share: the first sentence names them."""
    shown = [place for place, name in enumerate(headings) if name != "as" or len({row[place] for row in rows}) > 1]
    names = [headings[place] for place in shown]
    texts = [name for name in ("GPU", "as", "from", "cheaper above") if name in names]
    return text_table(names, [[row[place] for place in shown] for row in rows], texts=["read on"], wrapped=texts)


def print_rented(rented: RankedOffers, console: Console, *, by_utilisation: bool) -> None:
    """Print the assumptions, the answer, a row per GPU, on request its costs by utilisation, and what has no row."""
    first_of_card = {offer.card: offer for offer in reversed(rented.offers)}
    best = [offer for offer in rented.offers if offer is first_of_card[offer.card]]
    fitting = [offer for offer in best if offer.fits]
    assumed, *answer = rent_sentences(rented)
    legend = [
        "> cheapest, ? may be cheaper, ! misses a limit. USD/h: of one GPU. GPUs: rented for this load. TTFT: typical"
        " ms. ms/token: nine in ten are in this range. cost: USD per 1000 requests, idle time included.",
        *(["8: 64 below a price: its smallest host has 8 GPUs, for 64 USD/h."] if any(map(_host, fitting)) else []),
    ]
    blocks: list[Block] = [Sentences(answer, plain_from=1), rent_table(fitting), Lines(legend, "dim")]
    if by_utilisation:
        title = (
            "Typical USD per million tokens in / out by utilisation; cheaper above: requests/s where rankings cross:"
        )
        blocks += [Lines(["", title]), load_table(fitting)]
    blocks.append(Lines([*_rowless(rented, best), *_bases(fitting)], "dim"))
    print_block(Lines([assumed]), console)
    print_blocks(blocks, console)


def _rowless(rented: RankedOffers, best: Sequence[Offer]) -> list[str]:
    """What the table does not show, and why."""
    without = {(offer.precision, offer.engine): offer.why for offer in rented.offers if offer.verdict == "no basis"}
    lines = [
        f"{precision_words(form)} with {engine} engines has no row: {why}; another --engine may have one."
        for (form, engine), why in without.items()
    ]
    unfit = [offer for offer in best if offer.verdict == "does not fit"]
    if unfit:
        first, others = unfit[0], [offer.card for offer in unfit[1:]]
        why = f"{first.card} in {precision_words(first.precision)} ({first.why})"
        lines.append(f"Does not fit: {', '.join([why, *others])}.")
    if hidden := sum(offer.fits for offer in rented.offers) - sum(offer.fits for offer in best):
        lines.append(f"Each GPU has its best row; --format json has {hidden} more of other precisions and engines.")
    return lines


def _bases(fitting: Sequence[Offer]) -> list[str]:
    """The published figures that the ranges rest on, each once."""
    bases = sorted(dict.fromkeys(offer.basis for offer in fitting), key=len, reverse=True)
    return [basis for number, basis in enumerate(bases) if not any(basis in longer for longer in bases[:number])]


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
    """Only prices of this kind of provider; empty: of all."""
    provider: str
    """Only this provider's prices; empty: of all."""
    spot: bool
    host_index: float | None
    """The host's dispatch time over the reference; null: that with which each GPU is mostly rented."""
    cards: Sequence[Offer]
    notes: Sequence[str]


def rent_document(rented: RankedOffers) -> RentDocument:
    """Return the document of the offers of a model, with every assumption."""
    request = rented.request
    return RentDocument(
        rented.model, assumptions(rented), request.load, request.batch, request.engines, request.quants,
        request.price_class, request.provider, request.spot, request.host_index, rented.offers, rented.notes,
    )  # fmt: skip
