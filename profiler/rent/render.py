"""Print the offers of `rent` as sentences and tables, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from profiler.data.prices import age_words
from profiler.json_document import Document
from profiler.predict.costs import Span
from profiler.rent.offers import LOADS, Limits, Offer, Rented
from profiler.report.blocks import Lines, Sentences, TextTable, text_table
from profiler.report.terminal import print_blocks
from profiler.units import duration, percent, several, significant

RENT_COLUMNS = ("card", "as", "USD/h", "batch", "TTFT", "ms a token", "tokens/s", "in", "out")
LOAD_COLUMNS = ("card", "as", *(percent(load) for load in LOADS), "J/token", "cheaper from batch")
_MARKS = {"cheapest": "> ", "typically cheapest": "> ", "cannot tell": "? ", "too slow": "! "}
_MOST_ROWS = 16
_MOST_UNFIT = 6


def rent_sentences(rented: Rented) -> list[str]:
    """The answer as sentences: the best offer, others that may be cheaper, the limits, and notes."""
    best = rented.offers[0]
    assert best.request_usd is not None
    assert best.tpot_s is not None
    head = (
        f"{rented.model}, {rented.prompt_len} tokens in and {rented.new_tokens} out: {best.card} in"
        f" {_precision(best)} is {best.verdict}, {significant(1e3 * best.request_usd.typical, 2)} USD per thousand"
        f" requests at batch {best.batch} ({_span(best.request_usd.times(1e3))}), {duration(best.tpot_s.typical)} per"
        " token."
    )
    unsure = sum(offer.verdict == "cannot tell" for offer in rented.offers)
    lines = [head]
    if unsure:
        lines.append(
            f"{several(unsure, 'other row', 'other rows')} may be cheaper, since the ranges overlap (cannot tell). A"
            " run on one of the cards, or its profile, narrows them."
        )
    limits = [
        f"{name} of at most {duration(limit)}"
        for name, limit in (("TTFT", rented.limits.ttft_s), ("time per token", rented.limits.tpot_s))
        if limit is not None
    ]
    if limits:
        met = sum(offer.meets == "yes" for offer in rented.offers if offer.fits)
        lines.append(f"A {' and a '.join(limits)}: {several(met, 'row meets', 'rows meet')} it over the whole range.")
    return [*lines, *rented.notes]


def _precision(offer: Offer) -> str:
    return "16 bits" if offer.precision == "none" else offer.precision


def _span(span: Span, between: str = " to ") -> str:
    return f"{_usd(span.low)}{between}{_usd(span.high)}"


def _usd(value: float) -> str:
    """Two significant digits, but at most three decimals."""
    return significant(value, 2) if value >= 0.1 else f"{value:.3f}"


def rent_table(offers: Sequence[Offer]) -> TextTable:
    """Return a row per offer that fits, with typical figures at full load."""
    rows = []
    for offer in offers:
        if offer.ttft_s is None or offer.tpot_s is None or offer.tokens_per_s is None:
            continue
        full = offer.costs[0]
        rows.append(
            (
                _MARKS.get(offer.verdict, "  ") + offer.card,
                _precision(offer),
                significant(offer.usd_per_h, 3),
                f"{offer.batch}",
                duration(offer.ttft_s.typical),
                _span(offer.tpot_s.times(1e3), ".."),
                significant(offer.tokens_per_s.typical, 3),
                _usd(full.input.typical),
                _span(full.output, ".."),
            )
        )
    return text_table(RENT_COLUMNS, rows, wrapped=("card", "as"))


def load_table(offers: Sequence[Offer]) -> TextTable:
    """Return a row per offer that fits: typical USD per million tokens in and out by load, energy, and crossover."""
    rows = []
    for offer in offers:
        if not offer.costs:
            continue
        crossing = "-"
        if offer.crossover_from:
            crossing = f"{offer.crossover_batch or 'never'} ({offer.crossover_from})"
        joules = offer.joules_per_token_at_most
        rows.append(
            (
                offer.card,
                _precision(offer),
                *(f"{_usd(c.input.typical)} / {_usd(c.output.typical)}" for c in offer.costs),
                "-" if joules is None else f"<= {significant(joules, 2)}",
                crossing,
            )
        )
    return text_table(LOAD_COLUMNS, rows, wrapped=("card", "as", "cheaper from batch"))


def _price(offer: Offer) -> str:
    words = [offer.provider, "spot" if offer.spot else ""]
    if offer.machine_cards > 1:
        words.append(f"only {offer.machine_cards} at once")
    if offer.price_without:
        words.append(f"{offer.price_without} are billed on top")
    if offer.provider != "yours":
        words.append(age_words(offer.price_age_days))
    return f"{offer.card} {significant(offer.usd_per_h, 3)} ({', '.join(word for word in words if word)})"


def print_rented(rented: Rented, console: Console) -> None:
    """Print the answer, the GPUs that fit, their costs by load, and why others do not fit."""
    fitting = tuple(offer for offer in rented.offers if offer.fits)
    unfit = [offer for offer in rented.offers if not offer.fits]
    shown = fitting[:_MOST_ROWS]
    marks = [
        "in, out: USD per million tokens. The time per token and USD out are 90 % ranges, the rest is typical.",
        "> cheapest, ? may be as cheap, since the ranges overlap (cannot tell), ! misses a limit",
        "",
    ]
    omitted = len(fitting) - len(shown)
    notes = [f"USD per hour: {'; '.join(dict.fromkeys(map(_price, shown)))}"]
    notes += [f"{offer.card} ({_precision(offer)}): {offer.why}" for offer in unfit[:_MOST_UNFIT]]
    notes += [f"{len(unfit) - _MOST_UNFIT} more GPUs do not fit the model"] if len(unfit) > _MOST_UNFIT else []
    notes += [f"basis: {basis}" for basis in dict.fromkeys(offer.basis for offer in shown)]
    blocks = [
        Sentences(rent_sentences(rented), plain_from=1),
        rent_table(shown),
        Lines(marks, "dim"),
        Lines(["Typical USD per million tokens in / out, with that share of the batch in flight:"]),
        load_table(shown),
        Lines([f"{omitted} more rows: --format json has them all"] if omitted else []),
        Lines(notes, "dim"),
    ]
    print_blocks(blocks, console)


@dataclass(frozen=True)
class RentDocument(Document):
    """`roofscope rent --format json`."""

    model: str
    prompt_len: int
    new_tokens: int
    limits: Limits
    cards: Sequence[Offer]
    notes: Sequence[str]


def rent_document(rented: Rented) -> RentDocument:
    """Return the document of the offers of a model."""
    return RentDocument(rented.model, rented.prompt_len, rented.new_tokens, rented.limits, rented.offers, rented.notes)
