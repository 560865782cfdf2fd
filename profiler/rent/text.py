"""The offers of `rent` as sentences, tables and a picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from profiler.data.prices import OWN
from profiler.errors import RequestError
from profiler.rent.command import RentDocument, precision_words
from profiler.rent.offers import UTILISATIONS, Offer, Ranking, Span
from profiler.rent.options import Limits
from profiler.rent.serving import Fleet
from profiler.report.blocks import FULL_SCREEN, Block, Lines, Section, Sentences, TextTable, text_table
from profiler.units import duration, percent, several, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MARKS: dict[Ranking, str] = {"cheapest": "> ", "typically cheapest": "> ", "cannot tell": "? ", "too slow": "! "}


def rent_sentences(rented: RentDocument) -> list[str]:
    """The assumptions; the cheapest offer, the fastest, what is in doubt, how old the prices are; and caveats."""
    fitting = [offer for offer in rented.cards if offer.fits]
    able = [offer for offer in fitting if offer.meets != "no"]
    answer = [_cheapest(able[0], rented), _fastest(able, rented), _doubt(able)] if able else [_misses(fitting, rented)]
    return [rented.assumptions, *answer, *_ages(fitting), *rented.notes]


def _usd(usd: float) -> str:
    """Two significant digits, but at most three decimals."""
    return significant(usd, 2) if usd >= 0.1 else f"{usd:.3f}"


def _ends(span: Span, joint: str) -> str:
    """USD per thousand requests, of both ends of a range per request; one figure if they are the same."""
    return joint.join(dict.fromkeys(_usd(1e3 * end) for end in (span.low, span.high)))


def _named(offer: Offer) -> str:
    """Such as `2 x H100 SXM in 16 bits`."""
    return f"{offer.name} in {precision_words(offer.precision)}"


def _cheapest(first: Offer, rented: RentDocument) -> str:
    assert first.utilisation is not None
    head = "Cheapest"
    if first.meets != "yes":
        head = "None certainly meets the limits; typically cheapest"
    elif rented.load.limits != Limits():
        head = "Cheapest that certainly meets the limits"
    when = "" if first.provider == OWN else f", {first.price_date or 'undated'}"
    number = several(first.rented_gpus, "GPU", "GPUs")
    at = f"{number} at {percent(first.utilisation.typical)} utilisation, " if first.utilisation.typical != 1 else ""
    price = f"{significant(first.usd_per_h, 3)} USD/h per GPU ({first.provider}{when})"
    return f"{head}: {_named(first)}, {price}, {at}{_cost(first)}."


def _cost(offer: Offer) -> str:
    assert offer.request_usd is not None
    ends = _ends(offer.request_usd, " to ")
    return f"{_usd(1e3 * offer.request_usd.typical)} USD per thousand requests" + (
        f" ({ends})" if " to " in ends else ""
    )


def _fastest(able: Sequence[Offer], rented: RentDocument) -> str:
    def tokens_per_s(offer: Offer) -> float:
        return offer.tokens_per_s.typical if offer.tokens_per_s else 0.0

    def tpot_s(offer: Offer) -> float:
        return offer.tpot_s.typical if offer.tpot_s else math.inf

    if rented.load.rate_per_s is None:
        fastest = max(able, key=tokens_per_s)
        speed = f"{significant(tokens_per_s(fastest), 2)} output tokens/s"
    else:
        fastest = min(able, key=tpot_s)
        speed = f"{duration(tpot_s(fastest))} per token"
    return f"Fastest: {_named(fastest)}, {speed}, {_cost(fastest)}."


def _doubt(able: Sequence[Offer]) -> str:
    """Whether the cheapest meets the limits, which others may be cheaper, and the measurement that narrows it."""
    cheapest, unsure = able[0], [offer for offer in able if offer.verdict == "cannot tell"]
    doubts = [] if cheapest.meets == "yes" else [f"whether {_named(cheapest)} meets the limits"]
    if unsure:
        why = "its range overlaps" if unsure[0].meets == cheapest.meets else "may miss the limits"
        others = several(len(unsure), "other row", "other rows")
        doubts.append(f"{others} may be cheaper, first {_named(unsure[0])} ({why})")
    if not doubts:
        return "In doubt: nothing; no range overlaps the cheapest."
    card = (unsure[0] if cheapest.meets == "yes" else cheapest).card
    return (
        f"In doubt: {', and '.join(doubts)}; `roofscope ceilings --out gpu.json` on one {card} takes a minute and"
        " narrows it."
    )


def _misses(fitting: Sequence[Offer], rented: RentDocument) -> str:
    """By how much the best offer misses the limits, and what would meet them."""
    limits = rented.load.limits

    def excess(offer: Offer) -> list[tuple[float, str, str, Span]]:
        """(typical time / limit, what it is, its option, the time), the worst first."""
        assert offer.ttft_s is not None
        assert offer.tpot_s is not None
        both = (
            (offer.ttft_s.typical / (limits.ttft_s or math.inf), "to the first token", "--max-ttft-ms", offer.ttft_s),
            (offer.tpot_s.typical / (limits.tpot_s or math.inf), "per token", "--max-tpot-ms", offer.tpot_s),
        )
        return sorted(both, reverse=True)

    best = min(fitting, key=lambda offer: excess(offer)[0][0])
    worst, other = excess(best)
    missed = [worst, other] if other[0] > 1 else [worst]
    takes = [f"{duration(span.typical)} {words} ({ratio:.1f} times the limit)" for ratio, words, _, span in missed]
    options = " ".join(f"{option} {math.ceil(1e3 * span.high)}" for *_, option, span in missed)
    faster = ""
    if "compiled" not in rented.engines:
        faster = "; --engine compiled is faster"
    elif rented.quants == ("none",):
        faster = "; --quant int4wo or fp8 may be faster"
    return (
        f"No GPU meets the limits: the best, {_named(best)}, typically takes {' and '.join(takes)} on average;"
        f" {options} would meet them{faster}."
    )


def _ages(fitting: Sequence[Offer]) -> list[str]:
    """How old the table's prices are; nothing if all are the user's."""
    listed = {offer.card: offer.price_age_days for offer in fitting if offer.provider != OWN}
    ages = [age for age in listed.values() if age is not None]
    parts = [f"are {' to '.join(dict.fromkeys(map(str, (min(ages), max(ages)))))} days old"] if ages else []
    if undated := len(listed) - len(ages):
        parts.append(f"have no date for {undated} of {len(listed)} GPUs")
    give = f"give today's with --price '{next(iter(listed), '')}=USD_PER_HOUR'"
    return [f"The prices {' and '.join(parts)}; {give}."] if listed else []


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
                _ends(offer.request_usd, ".."),
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
    """Return a row per offer that fits: typical USD per million tokens in and out, energy, and the largest batches."""
    headings = ("GPU", "as", "load", *map(percent, UTILISATIONS), "J/token", "batch", "together")
    rows = []
    for offer in offers:
        assert offer.utilisation is not None
        rows.append(
            (
                offer.name,
                _as(offer, offers),
                percent(offer.utilisation.typical),
                *(f"{_usd(cost.input.typical)} / {_usd(cost.output.typical)}" for cost in offer.costs),
                f"<= {significant(offer.joules_per_token_at_most or 0.0, 2)}",
                str(offer.largest_batch_one_by_one),
                str(offer.largest_batch),
            )
        )
    return _table(headings, rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> TextTable:
    """A table without the precision and engine that all rows share: the first sentence names them."""
    shown = [place for place, name in enumerate(headings) if name != "as" or len({row[place] for row in rows}) > 1]
    names = [headings[place] for place in shown]
    texts = [name for name in ("GPU", "as", "from") if name in names]
    cells = [[row[place] for place in shown] for row in rows]
    return text_table(names, cells, texts=["read on"], wrapped=texts, ranked=True)


def rent_sections(rented: RentDocument, *, by_utilisation: bool) -> list[Section]:
    """The answer, its assumptions, a row per GPU, on request its costs by utilisation, and what has no row."""
    first_of_card = {offer.card: offer for offer in reversed(rented.cards)}
    best = [offer for offer in rented.cards if offer is first_of_card[offer.card]]
    fitting = [offer for offer in best if offer.fits]
    assumed, *answer = rent_sentences(rented)
    legend = [
        "> cheapest, ? may be cheaper, ! misses a limit. USD/h: of one GPU. GPUs: rented for this load. TTFT: typical"
        " mean in ms. ms/token: nine in ten means are in this range. cost: USD per 1000 requests, idle time included.",
        *(["8: 64 below a price: its smallest host has 8 GPUs, for 64 USD/h."] if any(map(_host, fitting)) else []),
    ]
    blocks: list[Block] = [Sentences(answer, plain_from=1), Lines([assumed]), rent_table(fitting), Lines(legend, "dim")]
    if by_utilisation:
        title = (
            "Typical USD per million tokens in / out by utilisation. batch: sequences that fit with prompts prefilled"
            " one at a time, as servers do; together: with all at once."
        )
        blocks += [Lines(["", title]), load_table(fitting)]
    blocks.append(Lines(_rowless(rented, best), "dim"))
    return [Section("", blocks), Section("", [Lines(_bases(fitting), "dim")], media=FULL_SCREEN)]


def _rowless(rented: RentDocument, best: Sequence[Offer]) -> list[str]:
    """What the table does not show, and why."""
    without = {(offer.precision, offer.engine): offer.why for offer in rented.cards if offer.verdict == "no basis"}
    lines = [
        f"{precision_words(form)} with {engine} engines has no row: {why}; another --engine may have one."
        for (form, engine), why in without.items()
    ]
    unfit = [offer for offer in best if offer.verdict == "does not fit"]
    if unfit:
        first, others = unfit[0], [offer.card for offer in unfit[1:]]
        why = f"{first.card} in {precision_words(first.precision)} ({first.why})"
        lines.append(f"Does not fit: {', '.join([why, *others])}.")
    if hidden := sum(offer.fits for offer in rented.cards) - sum(offer.fits for offer in best):
        lines.append(f"Each GPU has its best row; --format json has {hidden} more of other precisions and engines.")
    return lines


def _bases(fitting: Sequence[Offer]) -> list[str]:
    """The published figures that the ranges rest on, each once."""
    bases = sorted(dict.fromkeys(offer.basis for offer in fitting), key=len, reverse=True)
    return [basis for number, basis in enumerate(bases) if not any(basis in longer for longer in bases[:number])]


_MOST_LINES = 5
_POINTS = 240
_BEYOND = 3.0
"""The picture ends at this factor of the largest capacity of one replica."""
_TITLE_CHARACTERS = 105


def cost_picture(rented: RentDocument) -> Figure:
    """Draw USD per thousand requests over the requests per second, a line per offer that may meet the limits, up to 5.

    A line falls while a GPU has idle time, and jumps where another GPU is needed. Raises RequestError if no GPU may
    meet the limits.
    """
    import matplotlib.pyplot as plt  # it takes most of a second

    from profiler.report.plots.style import LINE_STYLES, STYLE_FILE, log_ticks

    drawn = [offer for offer in rented.cards if offer.capacity_per_s and offer.meets != "no"][:_MOST_LINES]
    if not drawn:
        raise RequestError("no GPU meets the limits: there is nothing to draw.")
    spans = [offer.capacity_per_s for offer in drawn if offer.capacity_per_s]
    planned = [span.low if offer.meets == "yes" else span.typical for offer, span in zip(drawn, spans, strict=True)]
    rates = np.geomspace(min(planned) / 30, _BEYOND * max(planned), _POINTS)
    several_engines = len({offer.engine for offer in drawn}) > 1
    with plt.style.context(STYLE_FILE):
        figure, axes = plt.subplots(figsize=(8, 5))
        for offer, span, capacity_per_s, style in zip(drawn, spans, planned, LINE_STYLES, strict=False):
            usd, low, high = (
                [1e3 * fleet.usd_per_request(rate) for rate in rates]
                for fleet in (
                    Fleet(each, offer.gpus, offer.machine_cards, offer.usd_per_h)
                    for each in (capacity_per_s, span.high, span.low)
                )
            )
            engine = f", {offer.engine}" if several_engines else ""
            label = f"{offer.name}, {precision_words(offer.precision)}{engine}, {offer.usd_per_h:.2f} USD/h"
            [line] = axes.plot(rates, usd, ls=style.dashes, label=label)
            axes.fill_between(rates, low, high, color=line.get_color(), alpha=0.10, lw=0)
        requested_per_s = rented.load.rate_per_s
        if requested_per_s is not None:
            axes.axvline(requested_per_s, color="0.4", lw=0.9, ls=":")
        axes.set(xscale="log", yscale="log", xlabel="requests per second", ylabel="USD per thousand requests")
        for axis in (axes.xaxis, axes.yaxis):
            log_ticks(axis, lambda value: significant(value, 1))
        axes.legend(fontsize=8)
        dotted = "" if requested_per_s is None else ", dotted: the requested rate"
        title = textwrap.fill(rented.assumptions, _TITLE_CHARACTERS)
        axes.set_title(f"{title}\nbands: nine in ten, steps: one more GPU{dotted}", fontsize=9, loc="left")
    return figure
