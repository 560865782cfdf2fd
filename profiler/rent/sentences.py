"""The answer of `rent` in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from profiler.data.prices import OWN
from profiler.data.published_results import EngineKind
from profiler.predict.costs import Span
from profiler.rent.command import RankedOffers, of_whom, precision_words
from profiler.rent.offers import Offer
from profiler.rent.workload import Limits
from profiler.units import duration, percent, several, significant

_ENGINES: dict[EngineKind, str] = {
    "compiled": "compiled engines (vLLM, TensorRT-LLM)",
    "eager": "plain transformers (eager)",
}


def rent_sentences(rented: RankedOffers) -> list[str]:
    """The assumptions; the cheapest offer, the fastest, what is in doubt, how old the prices are; and caveats."""
    fitting = [offer for offer in rented.offers if offer.fits]
    able = [offer for offer in fitting if offer.meets != "no"]
    answer = [_cheapest(able, rented), _fastest(able, rented), _doubt(able)] if able else [_misses(fitting, rented)]
    return [assumptions(rented), *answer, *_ages(fitting), *rented.notes]


def assumptions(rented: RankedOffers) -> str:
    """Model, engine, precision, lengths, load, limits and whose prices, as one sentence."""
    request, load = rented.request, rented.request.load
    engines = " and ".join(_ENGINES[engine] for engine in request.engines)
    precisions = " and ".join(dict.fromkeys(precision_words(offer.precision) for offer in rented.offers))
    if request.batch is not None:
        rate = f"always {request.batch} in flight"
    elif load.rate_per_s is None:
        rate = "a queue that is never empty"
    else:
        amount, unit = (load.rate_per_s, "s") if load.rate_per_s >= 0.1 else (3600 * load.rate_per_s, "h")
        number = f"{float(significant(amount, 2)):g}"
        rate = f"{number} {'request' if number == '1' else 'requests'}/{unit}"
    limits = [
        f"{name} at most {duration(limit)}"
        for name, limit in (("TTFT", load.limits.ttft_s), ("TPOT", load.limits.tpot_s))
        if limit is not None
    ]
    own = {offer.provider == OWN for offer in rented.offers}
    table = f"the lowest {'spot' if request.spot else 'on-demand'} prices{of_whom(request)}"
    prices = "your prices" if own == {True} else f"{table} and yours" if True in own else table
    return (
        f"{rented.model} with {engines} in {precisions}; {load.use}: {load.prompt_len} tokens in,"
        f" {load.new_tokens} out, {rate}, {', '.join(limits) or 'no latency limit'}; {prices}."
    )


def usd_words(usd: float) -> str:
    """Two significant digits, but at most three decimals."""
    return significant(usd, 2) if usd >= 0.1 else f"{usd:.3f}"


def _named(offer: Offer) -> str:
    """Such as `2 x H100 SXM in 16 bits`."""
    return f"{offer.name} in {precision_words(offer.precision)}"


def _cheapest(able: Sequence[Offer], rented: RankedOffers) -> str:
    first = able[0]
    assert first.utilisation is not None
    head = "Cheapest"
    if first.meets != "yes":
        head = "None certainly meets the limits; typically cheapest"
    elif rented.request.load.limits != Limits():
        head = "Cheapest that certainly meets the limits"
    when = "" if first.provider == OWN else f", {first.price_date or 'undated'}"
    number = several(first.rented_gpus, "GPU", "GPUs")
    at = f"{number} at {percent(first.utilisation.typical)} utilisation, " if first.utilisation.typical != 1 else ""
    price = f"{significant(first.usd_per_h, 3)} USD/h per GPU ({first.provider}{when})"
    return f"{head}: {_named(first)}, {price}, {at}{_cost(first)}."


def _cost(offer: Offer) -> str:
    assert offer.request_usd is not None
    low, typical, high = (usd_words(1e3 * end) for end in offer.request_usd.ends)
    return f"{typical} USD per thousand requests" + ("" if low == high else f" ({low} to {high})")


def _fastest(able: Sequence[Offer], rented: RankedOffers) -> str:
    def tokens_per_s(offer: Offer) -> float:
        return offer.tokens_per_s.typical if offer.tokens_per_s else 0.0

    def tpot_s(offer: Offer) -> float:
        return offer.tpot_s.typical if offer.tpot_s else math.inf

    if rented.request.load.rate_per_s is None:
        fastest = max(able, key=tokens_per_s)
        speed = f"{significant(tokens_per_s(fastest), 2)} output tokens/s"
    else:
        fastest = min(able, key=tpot_s)
        speed = f"{duration(tpot_s(fastest))} per token"
    return f"Fastest: {_named(fastest)}, {speed}, {_cost(fastest)}."


def _doubt(able: Sequence[Offer]) -> str:
    unsure = [offer for offer in able if offer.verdict == "cannot tell"]
    if not unsure:
        return "In doubt: nothing; no range overlaps the cheapest."
    first = unsure[0]
    why = "may miss the limits" if first.meets == "cannot tell" else "its range overlaps"
    return (
        f"In doubt: {several(len(unsure), 'other row', 'other rows')} may be cheaper, first {_named(first)} ({why});"
        f" `roofscope ceilings --out gpu.json` on one {first.card} takes a minute and narrows it."
    )


def _misses(fitting: Sequence[Offer], rented: RankedOffers) -> str:
    """By how much the best offer misses the limits, and what would meet them."""
    limits = rented.request.load.limits

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
    if "compiled" not in rented.request.engines:
        faster = "; --engine compiled is faster"
    elif rented.request.quants == ("none",):
        faster = "; --quant int4wo or fp8 may be faster"
    return (
        f"No GPU meets the limits: the best, {_named(best)}, typically takes {' and '.join(takes)}; {options} would"
        f" meet them{faster}."
    )


def _ages(fitting: Sequence[Offer]) -> list[str]:
    """How old the table's prices are; nothing if all are the user's."""
    listed = {offer.card: offer.price_age_days for offer in fitting if offer.provider != OWN}
    ages = [age for age in listed.values() if age is not None]
    parts = [f"are {' to '.join(dict.fromkeys(map(str, (min(ages), max(ages)))))} days old"] if ages else []
    parts += [f"have no date for {len(listed) - len(ages)} of {len(listed)} GPUs"] if len(ages) < len(listed) else []
    if not listed:
        return []
    return [f"The prices {' and '.join(parts)}; give today's with --price '{next(iter(listed))}=USD_PER_HOUR'."]
