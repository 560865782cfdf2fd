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
from profiler.data.published_coverage import coverage_sentences
from profiler.data.published_results import EngineKind, published
from profiler.predict.costs import Span
from profiler.predict.published_efficiency import basis_for
from profiler.quant.registry import FORMATS
from profiler.rent.plan import GpuShare, Times, times_on
from profiler.rent.serving import Fleet, Operation, crossover_rate, replicas_for
from profiler.rent.workload import Limits, RentRequest
from profiler.units import scaled

UTILISATIONS = (1.0, 0.5, 0.1)
_HOUR_S = 3600.0
_MILLION = 1e6

Meets = Literal["yes", "no", "cannot tell"]
Ranking = Literal["cheapest", "typically cheapest", "cannot tell", "dearer", "too slow", "does not fit", "no basis"]


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
    """The most sequences in flight that fit."""
    batch: int = 0
    """Sequences in flight at the requested rate; at full utilisation without one."""
    replicas: int = 1
    """Copies of the model that the requested rate needs."""
    rented_gpus: int = 1
    """GPUs of all replicas, in whole machines."""
    utilisation: Span | None = None
    """The requested rate as a share of what the replicas serve within the limits; 1 without a rate."""
    capacity_per_s: Span | None = None
    """Requests per second of one replica, with as many sequences in flight as the limits allow."""
    ttft_s: Span | None = None
    """Seconds to the first token."""
    tpot_s: Span | None = None
    """Seconds per output token, with the interruptions by other prompts."""
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
    crossover_per_s: float | None = None
    """The requests per second above which it first costs less than `crossover_from`; None if it never does."""
    crossover_from: str = ""
    """The next cheaper GPU per hour in the same precision and engine."""
    basis: str = ""
    """The published results on which the forecast rests."""

    @property
    def name(self) -> str:
        """Such as `L4` or `2 x H100 SXM`."""
        return self.card if self.gpus == 1 else f"{self.gpus} x {self.card}"

    @property
    def fleets(self) -> tuple[Fleet, Fleet, Fleet]:
        """The replicas as they are planned with the fastest, the typical and the slowest times of the range."""
        assert self.capacity_per_s is not None
        slow, typical, fast = self.capacity_per_s.ends
        return tuple(Fleet(each, self.gpus, self.machine_cards, self.usd_per_h) for each in (fast, typical, slow))  # type: ignore[return-value]

    @property
    def planned(self) -> Fleet:
        """The replicas that meet the limits over the whole range of times if that is possible, else typically."""
        return self.fleets[2 if self.meets == "yes" else 1]


def offer_of(
    share: GpuShare, sheet: Datasheet, prices: Sequence[Price], request: RentRequest, today: datetime.date
) -> Offer:
    """The offer of a model's share on a GPU, at that of its prices which makes the load the cheapest per hour.

    It has times and costs, or the reason why the model does not run there.
    """
    least = request.batch or 1
    largest = share.largest_batch_on(sheet)
    about: dict[str, Any] = {
        "gpus": share.gpus,
        "precision": share.precision,
        "engine": share.engine,
        "basis": " ".join(coverage_sentences(share.engine, share.format)),
        "verdict": "does not fit",
        "why": "",
    }
    if basis_for(share.format, share.engine) is None:
        about |= {"verdict": "no basis", "why": "no figure of it is published"}
    elif reason := _unsupported(sheet, share.format):
        about["why"] = reason
    elif largest < least:
        about["why"] = _shortage(share, sheet, least)
    fits = not about["why"]
    offers = [
        Offer(**vars(price), **about, price_age_days=price.age_days(today), fits=fits, largest_batch=largest)
        for price in prices
    ]
    if not fits:
        return min(offers, key=lambda offer: offer.machine_cards)
    times = times_on(share, sheet, largest, request.host_index)
    served = [_under_load(offer, share, times, sheet, request) for offer in offers]
    rate = request.load.rate_per_s or 0.0
    return min(served, key=lambda offer: (offer.planned.usd_per_h(rate), offer.machine_cards))


def _unsupported(sheet: Datasheet, format_: str) -> str | None:
    """The reason why a GPU cannot run a format; None if it can."""
    needs = FORMATS[format_].least_capability if format_ in FORMATS else 0.0
    if not needs:
        return None
    try:
        has = float(sheet.compute_capability)
    except ValueError:
        return f"{format_}: neither published figures nor a known torchao kernel for {sheet.vendor}"
    return f"{format_} needs compute capability {needs}, it has {has}" if has < needs else None


def _shortage(share: GpuShare, sheet: Datasheet, batch: int) -> str:
    """The memory that `batch` sequences need, by part, and what the GPU has."""
    need = share.need_on(sheet).at(np.array(min(batch, len(share.batches)) - 1))
    return (
        f"needs {scaled(float(need.safe_bytes), 'B')}: weights {scaled(share.weight_bytes, 'B')}, KV cache"
        f" {scaled(float(need.cache_bytes), 'B')}, workspace {scaled(float(need.workspace_bytes), 'B')}, free memory in"
        f" pieces {scaled(float(need.fragmentation_bytes), 'B')}; has room for"
        f" {scaled(sheet.room_bytes, 'B')}"
    )


def _under_load(priced: Offer, share: GpuShare, times: Times, sheet: Datasheet, request: RentRequest) -> Offer:
    """The offer `priced`, which has only a price, with its times and costs under the load.

    As many sequences are in flight as the limits allow over the whole range of times; if even one is too many, as the
    typical times allow. The request's `batch` fixes their number instead, without a rate.
    """
    limits, rate = request.load.limits, request.load.rate_per_s
    most, meets = (request.batch, _meets_at(times, request.batch, limits)) if request.batch else _most(times, limits)
    full = [end.with_in_flight(most) for end in times.ends]
    fast, typical, slow = (each.rate_per_s for each in full)
    priced = replace(priced, meets=meets, capacity_per_s=Span(slow, typical, fast))
    if rate is None:
        replicas, rented, operations = 1, share.gpus, full
        request_usd = Span(*(share.gpus * priced.usd_per_h / _HOUR_S / each.rate_per_s for each in full))
        utilisation = Span(1.0, 1.0, 1.0)
    else:
        replicas = replicas_for(rate, priced.planned.capacity_per_s)
        rented = priced.planned.rented_gpus(rate)
        operations = [end.at_rate(rate / replicas) for end in times.ends]
        request_usd = Span(*[priced.planned.usd_per_request(rate)] * 3)
        utilisation = Span(*(rate / replicas / each for each in (fast, typical, slow)))
    answers_per_s = [each.rate_per_s * replicas for each in reversed(operations)]
    return replace(
        priced,
        why=f"weights {scaled(share.weight_bytes, 'B')}, KV cache {scaled(share.cache_bytes, 'B')} per sequence"
        + (", on each GPU" if share.gpus > 1 else ""),
        batch=operations[1].in_flight,
        replicas=replicas,
        rented_gpus=rented,
        utilisation=utilisation,
        ttft_s=Span(*(each.ttft_s for each in operations)),
        tpot_s=Span(*(each.tpot_s for each in operations)),
        step_s=Span(*(each.step_s for each in operations)),
        tokens_per_s=Span(*(share.new_tokens * each for each in answers_per_s)),
        request_usd=request_usd,
        costs=tuple(_cost(priced, share, times, full, utilised) for utilised in UTILISATIONS),
        idle_usd_per_day=24 * priced.usd_per_h * max(rented, priced.machine_cards),
        joules_per_token_at_most=sheet.tdp_w * share.gpus / typical / share.new_tokens,
        basis=priced.basis + _extrapolation(share, most),
    )


def _most(times: Times, limits: Limits) -> tuple[int, Meets]:
    """(the most sequences in flight within the limits, whether they are met)."""
    if certain := times.high.largest_within(limits):
        return certain, "yes"
    if typical := times.typical.largest_within(limits):
        return typical, "cannot tell"
    return 1, "no"


def _meets_at(times: Times, batch: int, limits: Limits) -> Meets:
    """Whether `batch` sequences, always in flight, meet the limits."""

    def within(end: Operation) -> bool:
        return end.ttft_s <= (limits.ttft_s or math.inf) and end.tpot_s <= (limits.tpot_s or math.inf)

    if within(times.high.with_in_flight(batch)):
        return "yes"
    return "cannot tell" if within(times.typical.with_in_flight(batch)) else "no"


def _cost(priced: Offer, share: GpuShare, times: Times, full: Sequence[Operation], utilisation: float) -> Cost:
    """The cost of tokens at a share of the full rate; prompts and steps share it by the time that they take."""
    inputs, outputs = [], []
    for end, operation in zip(times.ends, full, strict=True):
        usd = priced.gpus * priced.usd_per_h / _HOUR_S / (operation.rate_per_s * utilisation)
        prompt_share = operation.rate_per_s * end.prompt_s
        inputs.append(_MILLION * usd * prompt_share / share.prompt_len)
        outputs.append(_MILLION * usd * (1 - prompt_share) / share.new_tokens)
    return Cost(utilisation, Span(*inputs), Span(*outputs))


def _extrapolation(share: GpuShare, batch: int) -> str:
    """The assumption of a range at a larger batch than any published one; empty at other batches."""
    most = max(
        (point.batch for point in published() if point.kind == share.engine and point.format == share.format), default=0
    )
    if batch <= most:
        return ""
    return f" Published up to batch {most}, beyond which the efficiency is assumed to be the same."


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
    return (*_with_crossovers(rows), *(each for each in offers if not each.fits))


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


def _with_crossovers(offers: Sequence[Offer]) -> list[Offer]:
    """The offers, each with the rate above which it undercuts the next cheaper per hour of its kind."""
    found = []
    for each in offers:
        cheaper = [
            other
            for other in offers
            if (other.precision, other.engine) == (each.precision, each.engine)
            and "no" not in (each.meets, other.meets)
            and other.planned.usd_per_h(0.0) < each.planned.usd_per_h(0.0)
        ]
        if cheaper:
            nearest = max(cheaper, key=lambda other: other.planned.usd_per_h(0.0))
            rate = crossover_rate(each.planned, nearest.planned)
            each = replace(each, crossover_per_s=rate, crossover_from=nearest.name)
        found.append(each)
    return found
