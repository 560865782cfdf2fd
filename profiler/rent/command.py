"""`rent`: offers of a model on every GPU with a price, in every requested precision and engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import TypeVar, get_args

from profiler.data.datasheets import gpu_called, gpus
from profiler.data.prices import OWN, Price, PriceClass, prices_of
from profiler.data.prices import prices as all_prices
from profiler.data.published_results import EngineKind, published
from profiler.errors import RequestError
from profiler.predict.published_efficiency import NO_MIXTURE, no_basis
from profiler.rent.offers import Offer, offer_of, ranked
from profiler.rent.plan import MOST_BATCH, Planner
from profiler.rent.workload import RentRequest, Workload
from profiler.units import short_count

RENTED_ENGINES: tuple[EngineKind, ...] = ("compiled", "eager")


@dataclass(frozen=True)
class RankedOffers:
    """The ranked offers of a model."""

    model: str
    request: RentRequest
    offers: tuple[Offer, ...]
    notes: tuple[str, ...] = ()


def rent(model: str, request: RentRequest, today: date) -> RankedOffers:
    """The offers of a model on GPUs with a price, ranked.

    Raises RequestError for an impossible request, or if the model fits no GPU, or no published figure covers it.
    """
    own = parse_prices(request.prices)
    names = [gpu_called(name.strip()).gpu for name in request.cards.split(",") if name.strip()]
    planner, offers = Planner(model, request.load), []
    for quant in request.quants:
        for engine in request.engines:
            for sheet in gpus():
                if names and sheet.gpu not in names:
                    continue
                share = planner.plan_on(sheet, quant, engine, request.batch or 1)
                listed = prices_of(
                    sheet.gpu,
                    share.gpus,
                    price_class=request.price_class,
                    provider=request.provider,
                    spot=request.spot,
                )
                if prices := [own[sheet.gpu]] if sheet.gpu in own else listed:
                    offers.append(offer_of(share, sheet, prices, request, today))
    unpriced = [name for name in names if name not in {offer.card for offer in offers}]
    no_price = (
        f"no {'spot' if request.spot else 'on-demand'} price{of_whom(request)} is known for"
        f" {', '.join(unpriced) or 'any GPU'}; give one: --price '{(unpriced or ['GPU'])[0]}=USD_PER_HOUR'."
    )
    if not offers:
        raise RequestError(no_price)
    if all(each.verdict == "no basis" for each in offers):
        raise RequestError(f"{model} has {no_basis(request.quants[0], request.engines[0])}")
    if not any(each.fits for each in offers):
        raise RequestError(_fits_nowhere(model, offers))
    notes = [*_notes(planner, request), *([f"{no_price[0].upper()}{no_price[1:]}"] if unpriced else [])]
    return RankedOffers(model, request, ranked(offers), tuple(notes))


def of_whom(request: RentRequest) -> str:
    """Whose prices are requested, such as ` of AWS`."""
    kind = f"{request.price_class}s".replace("communitys", "community hosts") if request.price_class else ""
    return f" of {request.provider or kind or 'any provider'}"


def _fits_nowhere(model: str, offers: Sequence[Offer]) -> str:
    """What the model needs in the smallest precision, and what the largest GPU has room for."""
    unfit = [each for each in offers if each.verdict == "does not fit"]
    largest = max((gpu_called(each.card) for each in unfit), key=lambda sheet: sheet.room_bytes)
    nearest = [each for each in unfit if each.card == largest.gpu][-1]
    return (
        f"{model} fits no GPU that has a price: in {precision_words(nearest.precision)} on {largest.gpu}, the largest,"
        f" it {nearest.why}. Try --quant int4wo, --engine eager --quant nf4, or a smaller --batch."
    )


def precision_words(precision: str) -> str:
    """Such as `16 bits` or `nf4`."""
    return "16 bits" if precision == "none" else precision


def rent_request(
    load: Workload,
    *,
    batch: int | None = None,
    quants: str = "none",
    engines: str = "compiled",
    price_class: str = "",
    provider: str = "",
    spot: bool = False,
    prices: str = "",
    cards: str = "",
    host_index: float | None = None,
) -> RentRequest:
    """The request of a command line, whose `quants`, `engines` and `cards` are lists with commas.

    Raises RequestError for an impossible value.
    """
    if batch is not None and not 1 <= batch <= MOST_BATCH:
        raise RequestError(f"--batch: {batch} is not possible; give 1 to {MOST_BATCH}.")
    if host_index is not None and not 0 < host_index < math.inf:
        raise RequestError("--host-index: give a number above 0, as `roofscope ceilings` prints it.")
    providers = sorted({price.provider for price in all_prices()}, key=str.lower)
    classes = [kind for kind in get_args(PriceClass) if kind != "own"]
    return RentRequest(
        replace(load, rate_per_s=None) if batch else load,
        batch,
        _listed(quants) or ("none",),
        tuple(_one_of("--engine", name, RENTED_ENGINES) for name in _listed(engines)) or ("compiled",),
        _one_of("--class", price_class, classes) if price_class else "",
        _one_of("--provider", provider, providers) if provider else "",
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
    for part in _listed(text):
        name, equals, value = part.rpartition("=")
        if not equals:
            raise RequestError(f"--price {part!r} has no price; give GPU=USD_PER_HOUR, such as 'T4=0.35'.")
        card = gpu_called(name.strip()).gpu
        try:
            usd = float(value.strip().removeprefix("$").removesuffix("USD").strip())
        except ValueError:
            raise RequestError(
                f"--price {part!r}: {value.strip()!r} is not a number of USD per hour; convert it."
            ) from None
        if not 0 < usd < math.inf:
            raise RequestError(f"--price {part!r}: a price must be above 0; leave the GPU out to use the table.")
        prices[card] = Price(card, OWN, "own", usd, price_source="--price")
    return prices


def _notes(planner: Planner, request: RentRequest) -> list[str]:
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
        sizes = [
            point.weight_bytes / _BYTES_PER_WEIGHT
            for point in published()
            if point.kind == engine and point.format == "dense"
        ]
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
