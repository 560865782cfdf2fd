"""`rent`: offers of a model on every GPU with a price, in every requested precision and engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import TypeVar

from profiler.data.datasheets import Datasheet, gpu_called, gpus
from profiler.data.prices import OWN, PRICE_CLASSES, Price, PriceClass, Quote, quote
from profiler.data.prices import prices as all_prices
from profiler.data.published_coverage import coverage_sentences
from profiler.data.published_results import EngineKind, published
from profiler.errors import RequestError
from profiler.predict.published_efficiency import NO_MIXTURE, basis_for, no_basis
from profiler.rent.offers import Offer, ranked, shortage, under_load, unsupported
from profiler.rent.plan import MOST_BATCH, GpuShare, Planner, Times, times_on
from profiler.rent.workload import WORKLOADS, Workload
from profiler.units import duration, scaled, short_count

RENTED_ENGINES: tuple[EngineKind, ...] = ("compiled", "eager")


@dataclass(frozen=True)
class RentRequest:
    """The load to serve, the precisions and engines, and the GPUs with their prices."""

    load: Workload = WORKLOADS["chat"]
    batch: int | None = None
    """Sequences always in flight, in place of a rate."""
    quants: tuple[str, ...] = ("none",)
    engines: tuple[EngineKind, ...] = ("compiled",)
    price_class: PriceClass = "hyperscaler"
    provider: str = ""
    """Only this provider's prices; empty: the lowest of the class."""
    spot: bool = False
    prices: str = ""
    """The user's own prices, such as `T4=0.35,H100 SXM=2.99`."""
    cards: str = ""
    host_index: float | None = None


@dataclass(frozen=True)
class RankedOffers:
    """The ranked offers of a model at the prices of one class, and the best of each other class."""

    model: str
    request: RentRequest
    offers: tuple[Offer, ...]
    other_classes: tuple[Offer, ...]
    """The cheapest offer of each other class, not ranked against these; at a price of the class, not of the user."""
    notes: tuple[str, ...] = ()


def rent(model: str, request: RentRequest, today: date) -> RankedOffers:
    """The offers of a model on GPUs with a price, ranked within one class of prices.

    Raises RequestError for an impossible request, or if the model fits no GPU, none is fast enough, or no published
    figure covers it.
    """
    own = parse_prices(request.prices)
    names = [gpu_called(name.strip()).gpu for name in request.cards.split(",") if name.strip()]
    sheets = [sheet for sheet in gpus() if not names or sheet.gpu in names]
    planner = Planner(model, request.load)
    serving = list(_serving(planner, request, sheets))
    by_class = {kind: _priced_offers(serving, kind, own, request, today) for kind in PRICE_CLASSES}
    offers = by_class[request.price_class]
    _refuse(model, request, serving, offers)
    others = [ranked(by_class[kind]) for kind in PRICE_CLASSES if kind != request.price_class and not request.provider]
    priced = {offer.card for offer in offers}
    notes = _notes(planner, request)
    if unpriced := [name for name in names if name not in priced]:
        notes.append(
            f"no {'spot' if request.spot else 'on-demand'} price ({request.provider or request.price_class}) is known"
            f" for {', '.join(unpriced)}: choose another --class, or give one: --price '{unpriced[0]}=USD_PER_HOUR'."
        )
    return RankedOffers(
        model,
        request,
        ranked(offers),
        tuple(
            rows[0]
            for rows in others
            if rows and rows[0].verdict in ("cheapest", "typically cheapest") and rows[0].provider != OWN
        ),
        tuple(notes),
    )


def rent_request(
    load: Workload,
    *,
    batch: int | None = None,
    quants: str = "none",
    engines: str = "compiled",
    price_class: str = "hyperscaler",
    provider: str = "",
    spot: bool = False,
    prices: str = "",
    cards: str = "",
    host_index: float | None = None,
) -> RentRequest:
    """The request of a command line, whose `quants`, `engines` and `cards` are lists with commas.

    A provider implies its class unless that is given. Raises RequestError for an impossible value.
    """
    if batch is not None and not 1 <= batch <= MOST_BATCH:
        raise RequestError(f"--batch: {batch} is not possible; give 1 to {MOST_BATCH}.")
    if host_index is not None and not 0 < host_index < math.inf:
        raise RequestError("--host-index: give a number above 0, as `roofscope ceilings` prints it.")
    own_classes = {price.kind: price.provider for price in all_prices() if price.provider.lower() == provider.lower()}
    if provider and not own_classes:
        names = sorted({price.provider for price in all_prices()}, key=str.lower)
        raise RequestError(f"--provider {provider!r} is unknown; use {', '.join(names)}.")
    kind = _one_of("--class", price_class, PRICE_CLASSES)
    if own_classes and kind not in own_classes:
        kind = next(iter(own_classes))
    return RentRequest(
        replace(load, rate_per_s=None) if batch else load,
        batch,
        _listed(quants) or ("none",),
        tuple(_one_of("--engine", name, RENTED_ENGINES) for name in _listed(engines)) or ("compiled",),
        kind,
        own_classes.get(kind, ""),
        spot,
        prices,
        cards,
        host_index,
    )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


Name = TypeVar("Name", bound=str)


def _one_of(option: str, name: str, known: Sequence[Name]) -> Name:
    """The known name that equals `name` in any case. Raises RequestError if there is none."""
    for each in known:
        if each.lower() == name.lower():
            return each
    raise RequestError(f"{option} {name!r} is unknown; use {', '.join(known)}.")


def parse_prices(text: str) -> dict[str, Price]:
    """Parse `T4=0.35,H100 SXM=2.99` to prices by GPU. Raises RequestError for an unknown GPU or an invalid price."""
    prices: dict[str, Price] = {}
    for part in (piece.strip() for piece in text.split(",") if piece.strip()):
        name, equals, value = part.rpartition("=")
        if not equals:
            raise RequestError(f"--price {part!r} has no price; give GPU=USD_PER_HOUR, such as 'T4=0.35'.")
        card = gpu_called(name.strip()).gpu
        amount = value.strip().removeprefix("$").removesuffix("USD").strip()
        try:
            usd = float(amount)
        except ValueError:
            raise RequestError(
                f"--price {part!r}: {value.strip()!r} is not a number of USD per hour; convert it."
            ) from None
        if not 0 < usd < float("inf"):
            raise RequestError(f"--price {part!r}: a price must be above 0; leave the GPU out to use the table.")
        prices[card] = Price(card, OWN, usd, False, None, "", None, "--price")
    return prices


@dataclass(frozen=True)
class Serving:
    """A plan on a GPU, before its price."""

    plan: GpuShare
    sheet: Datasheet
    why_not: str
    """Why it does not fit or run; empty if it does."""
    no_basis: bool = False
    times: Times | None = field(default=None, compare=False)


def _serving(planner: Planner, request: RentRequest, sheets: Sequence[Datasheet]) -> Iterator[Serving]:
    """Every precision and engine on every GPU, on as few GPUs as hold it."""
    least = request.batch or 1
    for quant in request.quants:
        for engine in request.engines:
            for sheet in sheets:
                plan = planner.plan_on(sheet, quant, engine, least)
                largest = plan.largest_batch_on(sheet)
                if basis_for(plan.format, engine) is None:
                    yield Serving(plan, sheet, "no figure of it is published", no_basis=True)
                elif reason := unsupported(sheet, plan.format):
                    yield Serving(plan, sheet, reason)
                elif largest < least:
                    yield Serving(plan, sheet, shortage(plan, sheet, least))
                else:
                    yield Serving(plan, sheet, "", times=times_on(plan, sheet, largest, request.host_index))


def _priced_offers(
    serving: Sequence[Serving], kind: PriceClass, own: Mapping[str, Price], request: RentRequest, today: date
) -> list[Offer]:
    """The offers of GPUs that have a price in a class; the user's own prices hold in every class."""
    offers = []
    for each in serving:
        name = each.sheet.gpu
        found = quote(name, kind, today, spot=request.spot, provider=request.provider, gpus=each.plan.gpus)
        if name in own:
            found = Quote(own[name], own[name].usd_per_h, 1, "")
        if found is None:
            continue
        offer = _offer(each, found, kind, today)
        if each.times is not None:
            offer = under_load(offer, each.plan, each.times, each.sheet, request.load, request.batch)
        offers.append(offer)
    return offers


def _offer(serving: Serving, found: Quote, kind: PriceClass, today: date) -> Offer:
    """An offer with its price, without times and costs."""
    price, plan = found.price, serving.plan
    return Offer(
        card=serving.sheet.gpu,
        gpus=plan.gpus,
        precision=plan.precision,
        engine=plan.engine,
        usd_per_h=price.usd_per_h,
        median_usd_per_h=found.median_usd_per_h,
        provider=price.provider,
        price_class=kind,
        spot=price.spot,
        region=price.region,
        price_date=price.read_on.isoformat() if price.read_on else "",
        price_age_days=price.age_days(today),
        price_source=price.source,
        price_mark=found.mark,
        machine_cards=price.cards,
        vcpus=price.vcpus,
        fits=serving.times is not None,
        why=serving.why_not,
        verdict="no basis" if serving.no_basis else "does not fit",
        basis=" ".join(coverage_sentences(plan.engine, plan.format)),
    )


def _notes(planner: Planner, request: RentRequest) -> list[str]:
    """Caveats of the ranges, as sentences."""
    plans = [planner.plan(quant, engine) for quant in request.quants for engine in request.engines]
    packed = dict.fromkeys(plan.precision for plan in plans if plan.format == "dense" and plan.precision != "none")
    notes = [
        f"{form}: the weights as published; the ranges have no figure of it, and assume the efficiency of 16 bits."
        for form in packed
    ]
    notes += [NO_MIXTURE] if any(plan.mixture for plan in plans) else []
    for engine in request.engines:
        sizes = [
            point.weight_bytes / _BYTES_PER_WEIGHT
            for point in published()
            if point.kind == engine and point.format == "dense"
        ]
        own = plans[0].parameters
        if not min(sizes) / _NEAR <= own <= max(sizes) * _NEAR:
            notes.append(
                f"No figure of a model of its size is published for {engine} engines: those have"
                f" {short_count(min(sizes))} to {short_count(max(sizes))} weights, this one {short_count(own)}. The"
                " ranges may not hold."
            )
    if "eager" in request.engines:
        notes.append("Plain transformers is assumed to let sequences join and leave between steps.")
    return notes


_BYTES_PER_WEIGHT = 2
_NEAR = 1.5
"""A model's size is covered up to this factor beyond the sizes of the published figures."""


def _refuse(model: str, request: RentRequest, serving: Sequence[Serving], offers: Sequence[Offer]) -> None:
    """Raises RequestError if there is no offer, or none that has a basis, fits, and typically meets the limits."""
    if not offers:
        raise RequestError(
            f"none of these GPUs has a price of {request.provider or request.price_class}; choose another --class, or"
            " give one: --price 'GPU=USD_PER_HOUR'."
        )
    if all(each.verdict == "no basis" for each in offers):
        raise RequestError(f"{model} has {no_basis(request.quants[0], request.engines[0])}")
    fitting = [each for each in offers if each.fits]
    if not fitting:
        unfit = [each for each in serving if not each.no_basis and each.sheet.gpu in {offer.card for offer in offers}]
        least = min(unfit, key=lambda each: each.plan.weight_bytes)
        largest = max((each.sheet for each in unfit), key=lambda sheet: sheet.room_bytes)
        raise RequestError(
            f"{model} fits no GPU that has a price: in {_words(least.plan.precision)} it"
            f" {least.why_not.split(';')[0]}; the largest, {largest.gpu}, has room for"
            f" {scaled(largest.room_bytes, 'B')}. Try --quant int4wo, --engine eager --quant nf4, or a smaller --batch."
        )
    if all(each.meets == "no" for each in fitting):
        raise RequestError(_misses(fitting, request))


def _misses(fitting: Sequence[Offer], request: RentRequest) -> str:
    """By how much the best offer misses the limits, and what would meet them."""
    limits = request.load.limits

    def excess(each: Offer) -> float:
        assert each.ttft_s is not None
        assert each.tpot_s is not None
        return max(
            each.ttft_s.typical / limits.ttft_s if limits.ttft_s else 0.0,
            each.tpot_s.typical / limits.tpot_s if limits.tpot_s else 0.0,
        )

    best = min(fitting, key=excess)
    assert best.ttft_s is not None
    assert best.tpot_s is not None
    parts, options = [], []
    for words, span, limit, option in (
        ("to the first token", best.ttft_s, limits.ttft_s, "--max-ttft-ms"),
        ("per token", best.tpot_s, limits.tpot_s, "--max-tpot-ms"),
    ):
        if limit is not None and span.typical > limit:
            parts.append(f"{duration(span.typical)} {words}, {span.typical / limit:.1f} times the limit")
            options.append(f"{option} {math.ceil(1e3 * span.high)}")
    remedies = [f"{' '.join(options)} would meet them"]
    if "compiled" not in request.engines:
        remedies.append("--engine compiled is faster")
    elif request.quants == ("none",):
        remedies.append("--quant int4wo or fp8 may be faster")
    return (
        f"no GPU meets the limits: the best, {best.name} in {_words(best.precision)}, typically takes"
        f" {' and '.join(parts)}; {'; '.join(remedies)}."
    )


def _words(precision: str) -> str:
    return "16 bits" if precision == "none" else precision
