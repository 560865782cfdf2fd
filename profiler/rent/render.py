"""Offers as sentences and rows, for the screen and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from profiler.data.prices import age_words
from profiler.predict.costs import Span
from profiler.rent.offers import LOADS, Offer, Rented
from profiler.report.forecast import forecast_table
from profiler.units import duration, percent, significant

RENT_COLUMNS = ("card", "as", "USD/h", "batch", "TTFT", "ms a token", "tokens/s", "in", "out")
LOAD_COLUMNS = ("card", "as", *(percent(load) for load in LOADS), "J/token", "cheaper from batch")
_MARKS = {"cheapest": "> ", "typically cheapest": "> ", "cannot tell": "? ", "too slow": "! "}
_MOST_ROWS = 16
_MOST_LACKING = 6


def rent_sentences(found: Rented) -> list[str]:
    """The answer in a few sentences."""
    best = found.offers[0]
    assert best.request_usd is not None
    assert best.tpot_s is not None
    head = (
        f"{found.model}, {found.prompt_len} tokens in and {found.new_tokens} out: {best.card} in {_precision(best)} is"
        f" {best.verdict}, {significant(1e3 * best.request_usd.typical, 2)} USD a thousand requests at batch"
        f" {best.batch} ({_span(best.request_usd.times(1e3))}), {duration(best.tpot_s.typical)} a token."
    )
    unsure = sum(offer.verdict == "cannot tell" for offer in found.offers)
    lines = [head]
    if unsure:
        lines.append(
            f"{unsure} other rows may be cheaper: their ranges overlap (cannot tell). A run on one of the cards, or its"
            " profile, narrows it."
        )
    asked = [
        f"{name} up to {duration(limit)}"
        for name, limit in (("TTFT", found.limits.ttft_s), ("a token", found.limits.tpot_s))
        if limit is not None
    ]
    if asked:
        met = sum(offer.meets == "yes" for offer in found.offers if offer.fits)
        lines.append(f"Asked for {' and '.join(asked)}: {met} rows meet that over their whole range.")
    return [*lines, *found.notes]


def _precision(offer: Offer) -> str:
    return "16 bits" if offer.precision == "none" else offer.precision


def _span(span: Span, between: str = " to ") -> str:
    return f"{_usd(span.low)}{between}{_usd(span.high)}"


def _usd(value: float) -> str:
    """Two digits, and no more decimals than a price has."""
    return significant(value, 2) if value >= 0.1 else f"{value:.3f}"


def rent_rows(offers: tuple[Offer, ...]) -> Sequence[tuple[str, ...]]:
    """One row a card and precision that fits: typical figures at full load."""
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
    return rows


def load_rows(offers: tuple[Offer, ...]) -> Sequence[tuple[str, ...]]:
    """What a million tokens typically cost in and out at each load, and from which batch a card beats its neighbour."""
    rows = []
    for offer in offers:
        if not offer.costs:
            continue
        crossing = "-"
        if offer.crossover_from:
            at = offer.crossover_batch
            crossing = f"{at or 'never'} ({offer.crossover_from})"
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
    return rows


def _price(offer: Offer) -> str:
    words = [offer.provider, "spot" if offer.spot else ""]
    if offer.machine_cards > 1:
        words.append(f"only {offer.machine_cards} at once")
    if offer.price_without:
        words.append(f"{offer.price_without} are billed on top")
    if offer.provider != "yours":
        words.append(age_words(offer.price_age_days))
    return f"{offer.card} {significant(offer.usd_per_h, 3)} ({', '.join(word for word in words if word)})"


def print_rented(found: Rented, console: Console) -> None:
    """Print the answer, the cards that fit, what they cost at which load, and why others do not fit."""
    console.print()
    for number, sentence in enumerate(rent_sentences(found)):
        console.print(Text(sentence, style="bold" if number == 0 else ""))
    console.print()
    able = tuple(offer for offer in found.offers if offer.fits)
    console.print(forecast_table(RENT_COLUMNS, rent_rows(able[:_MOST_ROWS])))
    ranges = "in, out: USD a million tokens. A token's time and USD out are ranges for nine in ten, the rest typical."
    console.print(Text(ranges, style="dim"))
    console.print(
        Text("> cheapest, ? as cheap for all that is known (cannot tell), ! slower than asked for", style="dim")
    )
    console.print()
    console.print(Text("USD a million tokens in / out, typically, with that share of the batch in flight:"))
    console.print(forecast_table(LOAD_COLUMNS, load_rows(able[:_MOST_ROWS])))
    if len(able) > _MOST_ROWS:
        console.print(Text(f"{len(able) - _MOST_ROWS} more rows: --format json has them all"))
    priced = dict.fromkeys(_price(offer) for offer in able[:_MOST_ROWS])
    console.print(Text(f"USD an hour: {'; '.join(priced)}", style="dim"))
    lacking = [offer for offer in found.offers if not offer.fits]
    for offer in lacking[:_MOST_LACKING]:
        console.print(Text(f"{offer.card} ({_precision(offer)}): {offer.why}", style="dim"))
    if len(lacking) > _MOST_LACKING:
        console.print(Text(f"{len(lacking) - _MOST_LACKING} more cards do not fit it", style="dim"))
    for words in dict.fromkeys(offer.basis for offer in able[:_MOST_ROWS]):
        console.print(Text(f"basis: {words}", style="dim"))


def rented_json(found: Rented) -> dict[str, object]:
    """The document of `roofscope rent --format json`."""
    return {
        "model": found.model,
        "prompt_len": found.prompt_len,
        "new_tokens": found.new_tokens,
        "limits": asdict(found.limits),
        "cards": [asdict(offer) for offer in found.offers],
        "notes": list(found.notes),
    }
