"""Offers of a model on rented GPUs: whether it fits, its range of speed, its cost, and their ranking."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from profiler.data.datasheets import Datasheet
from profiler.data.prices import OWN, Price
from profiler.data.published_results import EngineKind, coverage_sentences, published
from profiler.predict.published_efficiency import basis_for, obstacle_on
from profiler.rent.options import Limits, RentOptions
from profiler.rent.plan import GpuShare, times_on
from profiler.rent.serving import Fleet, Operation, StepTimes
from profiler.units import scaled

UTILISATIONS = (1.0, 0.5, 0.1)
_HOUR_S = 3600.0
_MILLION = 1e6

Meets = Literal["yes", "no", "cannot tell"]
Ranking = Literal["cheapest", "typically cheapest", "cannot tell", "dearer", "too slow", "does not fit", "no basis"]


@dataclass(frozen=True)
class Span:
    """A figure with its 90 % range."""

    low: float
    typical: float
    high: float

    def overlaps(self, other: Span) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Cost:
    """USD per million prompt and output tokens at a utilisation, shared by the time that each takes."""

    utilisation: float
    input: Span
    output: Span


@dataclass(frozen=True, kw_only=True)
class Offer(Price):
    """A model on one kind of GPU, in one precision, with one kind of engine, at one price."""

    price_age_days: int | None
    """Days since the price's date; null without a date."""
    gpus: int
    """GPUs of one replica; several if tensor parallelism splits the model."""
    precision: str
    """A dtype, or a format of `--quant`."""
    engine: EngineKind
    """The kind of engine whose published results the forecast uses."""
    fits: bool
    """Whether model and cache fit the memory."""
    why: str
    """The memory that the model needs, or the reason why it does not fit or run."""
    verdict: Ranking
    """Its place in the ranking by cost."""
    largest_batch: int = 0
    """The most sequences in flight that fit if all prompts are prefilled together."""
    largest_batch_one_by_one: int = 0
    """The same if prompts are prefilled one at a time, as servers do."""
    batch: int = 0
    """Sequences in flight at the requested rate; at full utilisation without one."""
    replicas: int = 1
    """Copies of the model that the requested rate needs."""
    rented_gpus: int = 1
    """GPUs of all replicas; at a rate, in whole machines."""
    utilisation: Span | None = None
    """The requested rate as a share of what the replicas serve within the limits; 1 without a rate."""
    capacity_per_s: Span | None = None
    """Requests per second of one replica, with as many sequences in flight as the limits allow."""
    ttft_s: Span | None = None
    """Mean seconds to the first token, with the wait for other prompts."""
    tpot_s: Span | None = None
    """Mean seconds per output token, with the interruptions by other prompts."""
    step_s: Span | None = None
    """Seconds of a decode step without them."""
    tokens_per_s: Span | None = None
    """Output tokens per second of all replicas."""
    request_usd: Span | None = None
    """USD per request at the requested rate, idle time included; at full utilisation without a rate."""
    costs: tuple[Cost, ...] = ()
    """USD per million tokens at several utilisations."""
    idle_usd_per_day: float = 0.0
    """What the rented GPUs cost in a day without a request."""
    meets: Meets = "yes"
    """Whether it stays within the requested latencies."""
    joules_per_token_at_most: float | None = None
    """Upper bound of the energy per output token, at the datasheet's full power and full utilisation."""
    basis: str = ""
    """The published results on which the forecast rests."""

    @property
    def name(self) -> str:
        """Such as `L4` or `2 x H100 SXM`."""
        return self.card if self.gpus == 1 else f"{self.gpus} x {self.card}"


def offer_of(
    share: GpuShare, sheet: Datasheet, prices: Sequence[Price], request: RentOptions, today: datetime.date
) -> Offer:
    """The offer of a model's share on a GPU, at that of its prices which makes the load the cheapest per hour.

    It has times and costs, or the reason why the model does not run there. As many sequences are in flight as the
    limits allow over the whole range of times; if even one is too many, as the typical times allow. The request's
    `batch` fixes their number instead, without a rate.
    """

    def offer_at(price: Price, **more: Any) -> Offer:
        return Offer(
            **vars(price),
            price_age_days=price.age_days(today),
            gpus=share.gpus,
            precision=share.precision,
            engine=share.engine,
            largest_batch=share.largest_batch_on(sheet, together=True),
            largest_batch_one_by_one=share.largest_batch_on(sheet, together=False),
            **more,
        )

    largest, basis = (
        share.largest_batch_on(sheet, together=share.together),
        " ".join(coverage_sentences(share.engine, share.format)),
    )
    verdict, why = _obstacle(share, sheet, request.batch or 1)
    if why:
        price = min(prices, key=lambda price: price.machine_cards)
        return offer_at(price, fits=False, why=why, verdict=verdict, basis=basis)
    times = times_on(share, sheet, largest, request.host_index)
    most, busy, meets = _in_flight(times, request.load.limits, request.batch)
    published_batches = [p.batch for p in published() if (p.kind, p.format) == (share.engine, share.format)]
    beyond = ""
    if most > (largest_published := max(published_batches, default=0)):
        beyond = f" Published up to batch {largest_published}, beyond which the efficiency is assumed to be the same."
    full = [end.with_in_flight(most, busy) for end in times]
    capacities = [operation.rate_per_s for operation in full]
    planned_per_s = capacities[2 if meets == "yes" else 1]
    rate_per_s = request.load.rate_per_s

    def fleet_at(price: Price) -> Fleet:
        return Fleet(planned_per_s, share.gpus, price.machine_cards, price.usd_per_h)

    price = min(prices, key=lambda each: (fleet_at(each).usd_per_h(rate_per_s or 0.0), each.machine_cards))
    fleet, operations, utilisation = fleet_at(price), full, Span(1.0, 1.0, 1.0)
    if rate_per_s is None:
        replicas, rented = 1, share.gpus
        request_usd = Span(*(share.gpus * price.usd_per_h / _HOUR_S / each for each in capacities))
    else:
        replicas, rented = fleet.replicas(rate_per_s), fleet.rented_gpus(rate_per_s)
        operations = [end.at_rate(rate_per_s / replicas) for end in times]
        utilisation = Span(*(rate_per_s / replicas / each for each in capacities))
        request_usd = Span(*[fleet.usd_per_request(rate_per_s)] * 3)
    return offer_at(
        price,
        fits=True,
        why=f"weights {scaled(share.weight_bytes, 'B')}, KV cache {scaled(share.cache_bytes, 'B')} per sequence"
        + (", on each GPU" if share.gpus > 1 else ""),
        verdict="cannot tell",
        batch=operations[1].in_flight,
        replicas=replicas,
        rented_gpus=rented,
        utilisation=utilisation,
        capacity_per_s=Span(*reversed(capacities)),
        ttft_s=Span(*(each.ttft_s for each in operations)),
        tpot_s=Span(*(each.tpot_s for each in operations)),
        step_s=Span(*(each.step_s for each in operations)),
        tokens_per_s=Span(*(share.new_tokens * replicas * each.rate_per_s for each in reversed(operations))),
        request_usd=request_usd,
        costs=tuple(_cost(price, share, times, full, utilised) for utilised in UTILISATIONS),
        idle_usd_per_day=24 * price.usd_per_h * max(rented, price.machine_cards),
        meets=meets,
        joules_per_token_at_most=sheet.tdp_w * share.gpus / capacities[2] / share.new_tokens,
        basis=basis + beyond,
    )


def _obstacle(share: GpuShare, sheet: Datasheet, batch: int) -> tuple[Ranking, str]:
    """(verdict, reason) if the model does not run on a GPU with `batch` sequences; an empty reason if it does."""
    if basis_for(share.format, share.engine) is None:
        return "no basis", "no figure of it is published"
    if why := obstacle_on(sheet, share.engine, share.format, share.precision if share.format == "dense" else None):
        return "does not fit", why
    if share.largest_batch_on(sheet, together=share.together) >= batch:
        return "cannot tell", ""
    need = share.need_on(sheet, together=share.together).at(np.array(batch - 1))
    return "does not fit", (
        f"needs {scaled(float(need.safe_bytes), 'B')}: weights {scaled(share.weight_bytes, 'B')}, KV cache"
        f" {scaled(float(need.cache_bytes), 'B')}, workspace {scaled(float(need.workspace_bytes), 'B')}, free memory in"
        f" pieces {scaled(float(need.fragmentation_bytes), 'B')}; has room for {scaled(sheet.room_bytes, 'B')}"
    )


def _in_flight(times: Sequence[StepTimes], limits: Limits, batch: int | None) -> tuple[int, float, Meets]:
    """(sequences in flight, share of their rate, whether they meet the limits), at the highest rate within the limits.

    `batch` sequences are always in flight.
    """
    _, typical, slow = times
    meets: Meets
    for end, meets in ((slow, "yes"), (typical, "cannot tell")):
        shares = end.shares_within(limits)
        most = batch or int(np.argmax(shares * end.rates_per_s)) + 1
        if shares[most - 1] >= 1 or (not batch and shares[most - 1] > 0):
            return most, float(shares[most - 1]), meets
    return batch or 1, 1.0, "no"


def _cost(
    price: Price, share: GpuShare, times: Sequence[StepTimes], full: Sequence[Operation], utilisation: float
) -> Cost:
    """The cost of tokens at a share of the full rate; prompts and steps share it by the time that they take."""
    inputs, outputs = [], []
    for end, operation in zip(times, full, strict=True):
        usd = share.gpus * price.usd_per_h / _HOUR_S / (operation.rate_per_s * utilisation)
        prompt_share = operation.rate_per_s * end.prompt_s
        inputs.append(_MILLION * usd * prompt_share / share.prompt_len)
        outputs.append(_MILLION * usd * (1 - prompt_share) / share.new_tokens)
    return Cost(utilisation, Span(*inputs), Span(*outputs))


_ORDER: dict[Meets, int] = {"yes": 0, "cannot tell": 1, "no": 2}


def ranked(offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """Offers that meet the limits first, by typical cost per request (dated prices first), each with its verdict.

    An offer whose range of costs overlaps that of the cheapest, or that may miss the limits and costs less, gets the
    verdict `cannot tell`. Offers that do not fit or have no basis follow.
    """

    def order(each: Offer) -> tuple[int, float, bool]:
        usd = each.request_usd.typical if each.request_usd else math.inf
        return _ORDER[each.meets], usd, not each.price_date and each.provider != OWN

    serving = sorted((each for each in offers if each.fits), key=order)
    rows = [replace(each, verdict=_verdict(each, serving[0], number)) for number, each in enumerate(serving)]
    if any(each.verdict == "cannot tell" for each in rows) and rows[0].verdict == "cheapest":
        rows[0] = replace(rows[0], verdict="typically cheapest")
    return (*rows, *(each for each in offers if not each.fits))


def _verdict(each: Offer, best: Offer, number: int) -> Ranking:
    assert each.request_usd is not None
    assert best.request_usd is not None
    if each.meets == "no":
        return "too slow"
    if number == 0:
        return "cheapest" if each.meets == "yes" else "typically cheapest"
    if each.meets == "cannot tell" and best.meets == "yes":
        return "cannot tell" if each.request_usd.low < best.request_usd.high else "dearer"
    if each.request_usd == best.request_usd:  # at the same rate, the same GPUs cost the same in every precision
        return "cheapest"
    return "cannot tell" if each.request_usd.overlaps(best.request_usd) else "dearer"
