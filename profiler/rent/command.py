"""`rent`: offers of a model on every GPU with a price, in every requested precision and engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from profiler.data.datasheets import gpu_called, gpus
from profiler.data.prices import OWN, prices_of
from profiler.data.published_results import EngineKind, published
from profiler.errors import RequestError
from profiler.json_document import Document, view
from profiler.predict.published_efficiency import NO_MIXTURE, no_basis
from profiler.rent.offers import Offer, offer_of, ranked
from profiler.rent.options import RentOptions, Workload
from profiler.rent.plan import Planner
from profiler.units import duration, short_count, significant

_BYTES_PER_WEIGHT = 2
_NEAR = 1.5
"""A model's size is covered up to this factor beyond the sizes of the published figures."""


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


def rent(request: RentOptions, today: date) -> RentDocument:
    """The offers of a model on GPUs with a price, ranked, with every assumption.

    Raises RequestError for an impossible request, or if the model fits no GPU, or no published figure covers it.
    """
    planner, offers, names = Planner(request.model, request.load), [], request.gpu_names
    for quant in request.quants:
        for engine in request.engines:
            for sheet in gpus():
                if names and sheet.gpu not in names:
                    continue
                share = planner.plan_on(sheet, quant, engine, request.batch or 1)
                own = request.own_prices.get(sheet.gpu)
                listed = prices_of(
                    sheet.gpu,
                    share.gpus,
                    price_class=request.price_class,
                    provider=request.provider,
                    spot=request.spot,
                )
                if priced := [own] if own else listed:
                    offers.append(offer_of(share, sheet, priced, request, today))
    unpriced = [name for name in names if name not in {offer.card for offer in offers}]
    no_price = (
        f"no {'spot' if request.spot else 'on-demand'} price{request.of_whom} is known for"
        f" {', '.join(unpriced) or 'any GPU'}; give one: --price '{(unpriced or ['GPU'])[0]}=USD_PER_HOUR'."
    )
    if not offers:
        raise RequestError(no_price)
    if all(each.verdict == "no basis" for each in offers):
        raise RequestError(f"{request.model} has {no_basis(request.quants[0], request.engines[0])}")
    if not any(each.fits for each in offers):
        unfit = [each for each in offers if each.verdict == "does not fit"]
        largest = max((gpu_called(each.card) for each in unfit), key=lambda sheet: sheet.room_bytes)
        nearest = [each for each in unfit if each.card == largest.gpu][-1]
        raise RequestError(
            f"{request.model} fits no GPU that has a price: in {precision_words(nearest.precision)} on {largest.gpu},"
            f" the largest, it {nearest.why}. Try --quant int4wo, --engine eager --quant nf4, or a smaller --batch."
        )
    notes = [*_notes(planner, request), *([f"{no_price[0].upper()}{no_price[1:]}"] if unpriced else [])]
    return view(RentDocument, request, assumptions=_assumptions(request, offers), cards=ranked(offers), notes=notes)


_ENGINES: dict[EngineKind, str] = {
    "compiled": "compiled engines (vLLM, TensorRT-LLM: prompts one at a time)",
    "eager": "plain transformers (eager: prompts of a batch together)",
}


def _assumptions(request: RentOptions, offers: Sequence[Offer]) -> str:
    """Model, engine, precision, lengths, load, limits and whose prices, as one sentence."""
    load = request.load
    engines = " and ".join(_ENGINES[engine] for engine in request.engines)
    precisions = " and ".join(dict.fromkeys(precision_words(offer.precision) for offer in offers))
    if request.batch is not None:
        rate = f"always {request.batch} in flight"
    elif load.rate_per_s is None:
        rate = "a queue that is never empty"
    else:
        amount, unit = (load.rate_per_s, "s") if load.rate_per_s >= 0.1 else (3600 * load.rate_per_s, "h")
        number = f"{float(significant(amount, 2)):g}"
        rate = f"{number} {'request' if number == '1' else 'requests'}/{unit}"
    limits = [
        f"mean {name} at most {duration(limit)}"
        for name, limit in (("TTFT", load.limits.ttft_s), ("TPOT", load.limits.tpot_s))
        if limit is not None
    ]
    own = {offer.provider == OWN for offer in offers}
    table = f"the lowest {'spot' if request.spot else 'on-demand'} prices{request.of_whom}"
    prices = "your prices" if own == {True} else f"{table} and yours" if True in own else table
    cached = f" ({load.prefix} of them the same in every prompt, and cached)" if load.prefix else ""
    return (
        f"{request.model} with {engines} in {precisions}; {load.use}: {load.prompt_len} tokens in{cached},"
        f" {load.new_tokens} out, {rate}, {', '.join(limits) or 'no latency limit'}; {prices}."
    )


def precision_words(precision: str) -> str:
    """Such as `16 bits` or `nf4`."""
    return "16 bits" if precision == "none" else precision


def _notes(planner: Planner, request: RentOptions) -> list[str]:
    """Caveats of the ranges, as sentences."""
    plans = [planner.plan(quant, engine) for quant in request.quants for engine in request.engines]
    notes = [
        f"{form}: the weights as published; the ranges have no figure of it, and assume the efficiency of 16 bits."
        for form in dict.fromkeys(plan.precision for plan in plans if plan.format == "dense")
        if form != "none"
    ]
    notes += [NO_MIXTURE] if any(plan.mixture for plan in plans) else []
    own = plans[0].parameters
    for engine in request.engines:
        dense = [point for point in published() if (point.kind, point.format) == (engine, "dense")]
        sizes = [point.weight_bytes / _BYTES_PER_WEIGHT for point in dense]
        if not min(sizes) / _NEAR <= own <= max(sizes) * _NEAR:
            notes.append(
                f"No figure of a model of its size is published for {engine} engines: those have"
                f" {short_count(min(sizes))} to {short_count(max(sizes))} weights, this one {short_count(own)}. The"
                " ranges may not hold."
            )
    if "eager" in request.engines:
        notes.append("Plain transformers is assumed to let sequences join and leave between steps.")
    return notes
