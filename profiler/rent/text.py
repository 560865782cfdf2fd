"""The offers of `rent` as sentences and a table."""

from collections.abc import Callable, Sequence

from profiler.data.prices import OWN
from profiler.quant.registry import FORMATS
from profiler.rent.command import Meets, Offer, RentDocument, Span
from profiler.report.blocks import FULL_SCREEN, Lines, Section, Sentences, text_table
from profiler.units import duration, significant

_ENGINES = {"compiled": "compiled engines (vLLM, TensorRT-LLM)", "eager": "plain transformers (eager)"}
_MARKS: dict[Meets, str] = {"yes": "", "cannot tell": "? ", "no": "! "}


def rent_sentences(rented: RentDocument) -> list[str]:
    """The engine and what it does, the comparison of costs, whose prices they are, and caveats."""
    named = {"TTFT": rented.max_ttft_s, "ms per token": rented.max_tpot_s}
    own = all(offer.provider == OWN for offer in rented.gpus)
    limits = [f"{name} at most {duration(limit)}" for name, limit in named.items() if limit is not None]
    return [
        f"{rented.model} in {rented.precision} with {_ENGINES[rented.engine]}: the prompts of a batch start together,"
        f" {rented.prompt_len} tokens each, and {rented.new_tokens} new tokens follow;"
        f" {' and '.join(limits) or 'no limits'}.",
        _comparison(rented.gpus),
        "The prices are yours."
        if own
        else "Each price is the newest on demand in roofscope's table, of one day the lowest. Prices age: give today's"
        f" with --price '{rented.gpus[0].gpu}=USD_PER_HOUR'.",
        *rented.notes,
    ]


def _comparison(offers: Sequence[Offer]) -> str:
    """Which GPU costs least, or which ranges overlap; offers are in the order of their typical costs."""
    costs = [(offer, cost) for offer in offers if (cost := offer.usd_per_million_tokens)]
    able, unsure = ([pair for pair in costs if pair[0].meets == meets] for meets in ("yes", "cannot tell"))
    if not able:
        may_be = f"; {_listed(unsure)} may be" if unsure else ""
        return f"No GPU is within the limits over its whole range, even with one sequence{may_be}."
    (first, cost), *others = able
    at = f"{significant(first.usd_per_h, 3)} USD/h ({_origin(first)})"
    head = f"{first.gpu} at {at}, {_range(cost, _usd)} USD per million new tokens"
    if not others and not unsure:
        return f"The only GPU within the limits: {head}."
    overlapping = [(offer, span) for offer, span in others if span.low <= cost.high]
    doubt = [(offer, span) for offer, span in unsure if span.low <= cost.high]
    may_miss = f" {_listed(doubt)} may cost less, but may miss the limits." if doubt else ""
    if overlapping:
        return (
            f"No GPU is the cheapest: the typically lowest range, {head}, overlaps those of"
            f" {_listed(overlapping)}.{may_miss}"
        )
    return f"Cheapest: {head}; no range of another GPU within the limits overlaps it.{may_miss}"


def _listed(offers: Sequence[tuple[Offer, Span]]) -> str:
    return ", ".join(offer.gpu for offer, _ in offers)


def _next_step(rented: RentDocument) -> str:
    """The run that measures the first offer, or what to change where no offer is within the limits."""
    first = rented.gpus[0]
    if first.meets == "no":
        return "allow a larger --max-ttft-ms or --max-tpot-ms, shorter prompts, or name fewer bits with --quant"
    is_named = rented.precision in FORMATS
    how = f" --quant {rented.precision}" if is_named else " --engine vllm" if rented.engine == "compiled" else ""
    sizes = ",".join(map(str, sorted({1, first.batch})))
    return (
        f"measure it on the first GPU: roofscope run {rented.model}{how} --prompt-lens {rented.prompt_len}"
        f" --batch-sizes {sizes} --new-tokens {rented.new_tokens}"
    )


def _origin(offer: Offer) -> str:
    return offer.provider if offer.provider == OWN else f"{offer.provider}, {offer.price_date or 'undated'}"


def _usd(usd: float) -> str:
    """Two significant digits, but at most three decimals."""
    return significant(usd, 2) if usd >= 0.1 else f"{usd:.3f}"


def _rate(per_s: float) -> str:
    return f"{significant(per_s / 1e3, 2)}k" if per_s >= 1e3 else significant(per_s, 2)


def _range(span: Span, shown: Callable[[float], str], joint: str = " to ") -> str:
    return f"{shown(span.low)}{joint}{shown(span.high)}"


def rent_sections(rented: RentDocument) -> list[Section]:
    """The sentences, a row per GPU that holds the model, what does not fit, and the source of each price."""
    sentences, rows = rent_sentences(rented), []
    unfit: dict[str, list[str]] = {}
    for offer in rented.gpus:
        if not offer.fits:
            unfit.setdefault(offer.why.partition(", has ")[0], []).append(offer.gpu)
        if offer.ttft_s and offer.tpot_s and offer.tokens_per_s and offer.usd_per_million_tokens:
            rows.append(
                (
                    offer.gpu,
                    f"{_MARKS[offer.meets]}{offer.batch}",
                    _range(offer.ttft_s, lambda seconds: significant(seconds, 2), ".."),
                    _range(offer.tpot_s, lambda seconds: significant(1e3 * seconds, 2), ".."),
                    _range(offer.tokens_per_s, _rate, ".."),
                    _range(offer.usd_per_million_tokens, _usd, ".."),
                    significant(offer.usd_per_h, 3),
                    _origin(offer),
                )
            )
    legend = "Ranges contain nine in ten measurements. ? may miss a limit, ! misses one, even with one sequence."
    blocks = [
        Sentences(sentences[:3], plain_from=2),
        text_table(
            ("GPU", "batch", "TTFT, s", "ms/tok", "tok/s", "USD/M tok", "USD/h", "price from"),
            rows,
            wrapped=("GPU", "price from"),
            ranked=True,
        ),
        Lines([legend, *(f"No row, {why}: {', '.join(names)}." for why, names in unfit.items())], "dim"),
        Lines(sentences[3:], "dim"),
    ]
    sources = [
        f"{offer.gpu}: {significant(offer.usd_per_h, 3)} USD/h, {offer.price_source}"
        for offer in rented.gpus
        if offer.provider != OWN
    ]
    return [
        Section("", blocks),
        Section("", [Lines(sources, "dim")], media=FULL_SCREEN),
        Section("", [Lines([f"next: {_next_step(rented)}"])]),
    ]
