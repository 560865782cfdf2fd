"""A model on rented GPUs: what fits, its range of speed, and the cheapest GPU that meets the limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from profiler.data.datasheets import Datasheet
from profiler.data.published_results import EngineKind, published
from profiler.grid.cells import Phase
from profiler.predict.costs import Cost, CostOverLoad, Curve, Span, cost_at, cost_line, span_at
from profiler.predict.operator_arrays import Array
from profiler.predict.predict import USABLE_MEMORY_SHARE
from profiler.predict.published_efficiency import (
    CONTEXT_BYTES,
    Range,
    WorkAt,
    attained,
    card_steps,
    family_of,
    host_index_of,
    peak_of,
)
from profiler.quant.registry import FORMATS
from profiler.units import scaled

LOADS = (1.0, 0.5, 0.1)
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Planned:
    """A model in one precision, counted at every batch size from 1 on; arrays are [batches]."""

    precision: str
    """A format of `--quant` (`none`: 16 bits), or the packed form that the weights are published in (`mxfp4`)."""
    format: str
    """As published figures call it."""
    layers: int
    prompt_len: int
    new_tokens: int
    weight_bytes: float
    """As they lie in memory."""
    cache_bytes: float
    """Of one sequence at its full length."""
    peak_bytes: Array
    work: dict[Phase, WorkAt]
    mixture: bool = False
    """Of experts."""

    @property
    def batches(self) -> Array:
        return np.arange(1, len(self.peak_bytes) + 1)


Meets = Literal["yes", "no", "cannot tell"]


@dataclass(frozen=True)
class Limits:
    """What latency is asked for; None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True)
class Offer:
    """One card in one precision."""

    card: str
    precision: str
    engine: EngineKind
    usd_per_h: float
    provider: str
    price_source: str
    price_age_days: int | None
    price_without: str
    """What is billed on top of the price; empty: it is whole."""
    spot: bool
    vcpus: float | None
    fits: bool
    why: str
    """What it holds, or what it lacks."""
    largest_batch: int = 0
    batch: int = 0
    ttft_s: Span | None = None
    tpot_s: Span | None = None
    tokens_per_s: Span | None = None
    costs: tuple[Cost, ...] = ()
    request_usd: Span | None = None
    """Of one request at full load: its prompt and its new tokens."""
    meets: Meets = "yes"
    joules_per_token_at_most: float | None = None
    """Of an output token, if the card took its datasheet's full power all the time."""
    crossover_batch: int | None = None
    machine_cards: int = 1
    """Of the machine that it is rented with."""
    crossover_from: str = ""
    """The cheaper card an hour that it undercuts a token from that batch on."""
    verdict: str = ""
    basis: str = ""


_MOST_LINES = 5


@dataclass(frozen=True)
class Rented:
    """The whole answer."""

    model: str
    prompt_len: int
    new_tokens: int
    limits: Limits
    offers: tuple[Offer, ...]
    curves: Mapping[tuple[str, str], Curve]
    """By card and precision, of those that fit."""
    notes: tuple[str, ...] = ()

    @property
    def over_load(self) -> CostOverLoad:
        """What the first offers that fit, in their order, cost over the load."""
        chosen = [offer for offer in self.offers if offer.fits][:_MOST_LINES]
        drawn = {(offer.card, offer.precision) for offer in chosen}
        lines = (
            cost_line(
                self.curves[offer.card, offer.precision],
                offer.precision,
                offer.usd_per_h,
                offer.crossover_batch if (offer.crossover_from, offer.precision) in drawn else None,
            )
            for offer in chosen
        )
        return CostOverLoad(self.model, self.prompt_len, self.new_tokens, tuple(lines))


def curve(plan: Planned, sheet: Datasheet, usd_per_h: float, engine: EngineKind, host_index: float | None) -> Curve:
    """How fast a range a model is on a card, at every batch size that fits."""
    room = USABLE_MEMORY_SHARE * sheet.memory_bytes - CONTEXT_BYTES
    largest = int(np.searchsorted(plan.peak_bytes, room, side="right"))
    host = host_index_of(sheet.gpu) if host_index is None else host_index
    return Curve(
        sheet.gpu,
        usd_per_h / _HOUR_S,
        _range(plan, "prefill", sheet, engine, largest, host),
        _range(plan, "decode", sheet, engine, largest, host),
        largest,
    )


def _range(plan: Planned, phase: Phase, sheet: Datasheet, engine: EngineKind, largest: int, host: float) -> Range:
    work = plan.work[phase]
    query = plan.prompt_len if phase == "prefill" else 1
    found = [np.zeros(largest) for _ in range(3)]
    families = np.array([family_of(plan.format, int(batch), query) for batch in plan.batches[:largest]], dtype=object)
    for family in set(families):
        chosen = np.flatnonzero(families == family)
        steps = card_steps(
            sheet, work.at(chosen), plan.batches[chosen], peak=peak_of(sheet, plan.format), layers=plan.layers,
            host_index=host,
        )  # fmt: skip
        told = attained(engine, str(family)).range_s(steps, phase)
        for into, values in zip(found, (told.low_s, told.typical_s, told.high_s), strict=True):
            into[chosen] = values
    return Range(*found)


def unsupported(sheet: Datasheet, format_: str) -> str | None:
    """Why a card cannot run a format, or None."""
    needs = FORMATS[format_].least_capability if format_ in FORMATS else 0.0
    if not needs:
        return None
    try:
        has = float(sheet.compute_capability)
    except ValueError:
        return f"{format_}: no published figure and no torchao kernel that is known for {sheet.vendor}"
    return f"{format_} needs compute capability {needs}, it has {has}" if has < needs else None


def offer(
    plan: Planned,
    sheet: Datasheet,
    bare: Offer,
    made: Curve,
    batch: int | None,
    limits: Limits,
) -> Offer:
    """A card's row: `bare` says what it is and costs, the rest is told here."""
    asked = batch or 1
    if reason := unsupported(sheet, plan.format):
        return replace(bare, fits=False, why=reason)
    if made.largest < asked:
        return replace(bare, fits=False, why=_lacks(plan, sheet, asked), largest_batch=made.largest)
    chosen = batch or _chosen(made, limits)
    ttft, tpot = span_at(made.ttft, chosen), span_at(made.tpot, chosen)
    costs = tuple(cost_at(made, load, chosen, plan.prompt_len) for load in LOADS)
    request = Span(*(
        made.usd_per_s * (first + (plan.new_tokens - 1) * step) / chosen  # a prefill gives the first
        for first, step in zip(ttft.ends, tpot.ends, strict=True)
    ))  # fmt: skip
    return replace(
        bare,
        why=f"weights {scaled(plan.weight_bytes, 'B')}, KV cache {scaled(plan.cache_bytes, 'B')} a sequence",
        largest_batch=made.largest,
        batch=chosen,
        ttft_s=ttft,
        tpot_s=tpot,
        tokens_per_s=Span(chosen / tpot.high, chosen / tpot.typical, chosen / tpot.low),
        costs=costs,
        request_usd=request,
        meets=_meets(ttft, tpot, limits),
        joules_per_token_at_most=sheet.tdp_w * tpot.typical / chosen,
        basis=bare.basis + _reach(plan, bare.engine, chosen),
    )


def _reach(plan: Planned, engine: EngineKind, batch: int) -> str:
    """What a range assumes beyond the batches that were published."""
    most = max(
        (point.batch for point in published() if point.kind == engine and point.format == plan.format), default=0
    )
    if batch <= most:
        return ""
    return f"; published up to batch {most}: beyond, its shares of the roofs are assumed to hold"


def _lacks(plan: Planned, sheet: Datasheet, batch: int) -> str:
    at = min(batch, len(plan.peak_bytes)) - 1
    cache = batch * plan.cache_bytes
    work = max(0.0, float(plan.peak_bytes[at]) - plan.weight_bytes - cache) + CONTEXT_BYTES
    return (
        f"needs {scaled(float(plan.peak_bytes[at]) + CONTEXT_BYTES, 'B')}: weights {scaled(plan.weight_bytes, 'B')}, KV"
        f" cache {scaled(cache, 'B')}, workspace {scaled(work, 'B')}; has {scaled(sheet.memory_bytes, 'B')}"
    )


def _chosen(made: Curve, limits: Limits) -> int:
    """The largest batch that typically meets the limits; 1 where none does."""
    good = np.ones(made.largest, dtype=bool)
    if limits.ttft_s is not None:
        good &= made.ttft.typical_s <= limits.ttft_s
    if limits.tpot_s is not None:
        good &= made.tpot.typical_s <= limits.tpot_s
    met = np.flatnonzero(good)
    return int(met[-1]) + 1 if len(met) else 1


def _meets(ttft: Span, tpot: Span, limits: Limits) -> Meets:
    pairs = [(span, limit) for span, limit in ((ttft, limits.ttft_s), (tpot, limits.tpot_s)) if limit is not None]
    if all(span.high <= limit for span, limit in pairs):
        return "yes"
    return "no" if any(span.low > limit or span.typical > limit for span, limit in pairs) else "cannot tell"


def ranked(offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """What meets the limits first, the cheapest request first; a row that may be the cheapest as well says so."""
    order = {"yes": 0, "cannot tell": 1, "no": 2}
    able = sorted(
        (each for each in offers if each.fits and each.request_usd is not None),
        key=lambda each: (order[each.meets], each.request_usd.typical if each.request_usd else math.inf),
    )
    best = able[0].request_usd if able else None
    told = []
    for number, each in enumerate(able):
        if each.meets == "no":
            verdict = "too slow"
        elif number == 0:
            verdict = "cheapest"
        elif best is not None and each.request_usd is not None and each.request_usd.overlaps(best):
            verdict = "cannot tell"
        else:
            verdict = "dearer"
        told.append(replace(each, verdict=verdict))
    # Where others may as well be the cheapest, the first is only the first.
    if len(told) > 1 and any(each.verdict == "cannot tell" for each in told):
        told[0] = replace(told[0], verdict="typically cheapest")
    return (*told, *(replace(each, verdict="does not fit") for each in offers if not each.fits))
