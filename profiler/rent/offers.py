"""Offers of a model on rented GPUs: whether it fits, its range of speed, its cost, and their ranking."""

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
    """A model in one precision, with its work and memory at every batch size from 1; arrays are [batches]."""

    precision: str
    """A format of `--quant` (`none`: 16 bits), or the packed format in which the weights are published (`mxfp4`)."""
    format: str
    """The format's name in published figures."""
    layers: int
    prompt_len: int
    new_tokens: int
    weight_bytes: float
    """Bytes of the weights in memory."""
    cache_bytes: float
    """Bytes of the KV cache of one sequence at its full length."""
    peak_bytes: Array
    work: dict[Phase, WorkAt]
    mixture: bool = False
    """Whether it is a mixture of experts."""

    @property
    def batches(self) -> Array:
        return np.arange(1, len(self.peak_bytes) + 1)


Meets = Literal["yes", "no", "cannot tell"]


@dataclass(frozen=True)
class Limits:
    """The user's latency limits; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True)
class Offer:
    """A model on one GPU in one precision."""

    card: str
    precision: str
    engine: EngineKind
    usd_per_h: float
    provider: str
    price_source: str
    price_age_days: int | None
    price_without: str
    """Parts of the machine that are billed separately; empty if there are none."""
    spot: bool
    vcpus: float | None
    fits: bool
    why: str
    """The memory that the model needs, or the reason why it does not fit or run."""
    largest_batch: int = 0
    batch: int = 0
    ttft_s: Span | None = None
    tpot_s: Span | None = None
    tokens_per_s: Span | None = None
    costs: tuple[Cost, ...] = ()
    request_usd: Span | None = None
    """USD per request at full load: its prompt and its new tokens."""
    meets: Meets = "yes"
    joules_per_token_at_most: float | None = None
    """Upper bound of the energy per output token, at the datasheet's full power."""
    crossover_batch: int | None = None
    """The batch from which it costs less per token than `crossover_from`; None if it never does."""
    machine_cards: int = 1
    """GPUs of the machine with which it is rented."""
    crossover_from: str = ""
    """The next cheaper GPU per hour in the same precision."""
    verdict: str = ""
    basis: str = ""


_MOST_LINES = 5


@dataclass(frozen=True)
class Rented:
    """The ranked offers of a model, with their curves."""

    model: str
    prompt_len: int
    new_tokens: int
    limits: Limits
    offers: tuple[Offer, ...]
    curves: Mapping[tuple[str, str], Curve]
    """By (card, precision), for offers that fit."""
    notes: tuple[str, ...] = ()

    @property
    def over_load(self) -> CostOverLoad:
        """The cost over the load of the first five offers that fit."""
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
    """The ranges of TTFT and time per token on a GPU, at every batch size that fits."""
    usable_bytes = USABLE_MEMORY_SHARE * sheet.memory_bytes - CONTEXT_BYTES
    largest = int(np.searchsorted(plan.peak_bytes, usable_bytes, side="right"))
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
    low_s, typical_s, high_s = (np.zeros(largest) for _ in range(3))
    families = np.array([family_of(plan.format, int(batch), query) for batch in plan.batches[:largest]], dtype=object)
    for family in set(families):
        chosen = np.flatnonzero(families == family)
        steps = card_steps(
            sheet, work.at(chosen), plan.batches[chosen], peak=peak_of(sheet, plan.format), layers=plan.layers,
            host_index=host,
        )  # fmt: skip
        part = attained(engine, str(family)).range_s(steps, phase)
        low_s[chosen], typical_s[chosen], high_s[chosen] = part.low_s, part.typical_s, part.high_s
    return Range(low_s, typical_s, high_s)


def unsupported(sheet: Datasheet, format_: str) -> str | None:
    """The reason why a GPU cannot run a format; None if it can."""
    needs = FORMATS[format_].least_capability if format_ in FORMATS else 0.0
    if not needs:
        return None
    try:
        has = float(sheet.compute_capability)
    except ValueError:
        return f"{format_}: neither published figures nor a known torchao kernel for {sheet.vendor}"
    return f"{format_} needs compute capability {needs}, it has {has}" if has < needs else None


def offer(plan: Planned, sheet: Datasheet, priced: Offer, gpu_curve: Curve, batch: int | None, limits: Limits) -> Offer:
    """The offer `priced`, which has only a price, with its times and costs.

    They are those at `batch`, by default the largest that typically meets the limits.
    """
    if reason := unsupported(sheet, plan.format):
        return replace(priced, fits=False, why=reason)
    largest = gpu_curve.largest
    if largest < (batch or 1):
        return replace(priced, fits=False, why=_shortage(plan, sheet, batch or 1), largest_batch=largest)
    chosen = batch or _best_batch(gpu_curve, limits)
    ttft, tpot = span_at(gpu_curve.ttft, chosen), span_at(gpu_curve.tpot, chosen)
    costs = tuple(cost_at(gpu_curve, load, chosen, plan.prompt_len) for load in LOADS)
    request = Span(*(
        gpu_curve.usd_per_s * (first + (plan.new_tokens - 1) * step) / chosen  # the prefill gives the first token
        for first, step in zip(ttft.ends, tpot.ends, strict=True)
    ))  # fmt: skip
    return replace(
        priced,
        why=f"weights {scaled(plan.weight_bytes, 'B')}, KV cache {scaled(plan.cache_bytes, 'B')} per sequence",
        largest_batch=largest,
        batch=chosen,
        ttft_s=ttft,
        tpot_s=tpot,
        tokens_per_s=Span(chosen / tpot.high, chosen / tpot.typical, chosen / tpot.low),
        costs=costs,
        request_usd=request,
        meets=_meets(ttft, tpot, limits),
        joules_per_token_at_most=sheet.tdp_w * tpot.typical / chosen,
        basis=priced.basis + _extrapolation(plan, priced.engine, chosen),
    )


def _extrapolation(plan: Planned, engine: EngineKind, batch: int) -> str:
    """The assumption of a range at a larger batch than any published one; empty at other batches."""
    most = max(
        (point.batch for point in published() if point.kind == engine and point.format == plan.format), default=0
    )
    if batch <= most:
        return ""
    return f"; published up to batch {most}, beyond which the efficiency is assumed to be the same"


def _shortage(plan: Planned, sheet: Datasheet, batch: int) -> str:
    peak_bytes = float(plan.peak_bytes[min(batch, len(plan.peak_bytes)) - 1])
    cache_bytes = batch * plan.cache_bytes
    workspace_bytes = max(0.0, peak_bytes - plan.weight_bytes - cache_bytes) + CONTEXT_BYTES
    return (
        f"needs {scaled(peak_bytes + CONTEXT_BYTES, 'B')}: weights {scaled(plan.weight_bytes, 'B')}, KV cache"
        f" {scaled(cache_bytes, 'B')}, workspace {scaled(workspace_bytes, 'B')}; has {scaled(sheet.memory_bytes, 'B')}"
    )


def _best_batch(gpu_curve: Curve, limits: Limits) -> int:
    """The largest batch that typically meets the limits; 1 if none does."""
    meets = np.ones(gpu_curve.largest, dtype=bool)
    if limits.ttft_s is not None:
        meets &= gpu_curve.ttft.typical_s <= limits.ttft_s
    if limits.tpot_s is not None:
        meets &= gpu_curve.tpot.typical_s <= limits.tpot_s
    indices = np.flatnonzero(meets)
    return int(indices[-1]) + 1 if len(indices) else 1


def _meets(ttft: Span, tpot: Span, limits: Limits) -> Meets:
    pairs = [(span, limit) for span, limit in ((ttft, limits.ttft_s), (tpot, limits.tpot_s)) if limit is not None]
    if all(span.high <= limit for span, limit in pairs):
        return "yes"
    return "no" if any(span.low > limit or span.typical > limit for span, limit in pairs) else "cannot tell"


def ranked(offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """Offers that meet the limits first, by typical cost per request, each with its verdict.

    An offer whose range overlaps that of the cheapest gets the verdict `cannot tell`.
    """
    order = {"yes": 0, "cannot tell": 1, "no": 2}
    fitting = sorted(
        (each for each in offers if each.fits and each.request_usd is not None),
        key=lambda each: (order[each.meets], each.request_usd.typical if each.request_usd else math.inf),
    )
    best = fitting[0].request_usd if fitting else None
    rows = []
    for number, each in enumerate(fitting):
        if each.meets == "no":
            verdict = "too slow"
        elif number == 0:
            verdict = "cheapest"
        elif best is not None and each.request_usd is not None and each.request_usd.overlaps(best):
            verdict = "cannot tell"
        else:
            verdict = "dearer"
        rows.append(replace(each, verdict=verdict))
    if len(rows) > 1 and any(each.verdict == "cannot tell" for each in rows):
        rows[0] = replace(rows[0], verdict="typically cheapest")
    return (*rows, *(replace(each, verdict="does not fit") for each in offers if not each.fits))
