"""`rent`: offers of a model on every GPU with a price, in every requested precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise

import numpy as np

from profiler.counting.attention import AttentionCore
from profiler.counting.cache import counted_model
from profiler.counting.operators import Experts
from profiler.counting.peak_memory import cache_bytes
from profiler.data.datasheets import gpu_called, gpus
from profiler.data.prices import Price, cheapest
from profiler.data.published_coverage import coverage_sentences
from profiler.data.published_results import EngineKind
from profiler.errors import RequestError
from profiler.grid.cells import PHASES, Phase
from profiler.grid.ranges import MOST, check_positions
from profiler.loading.source import resolve
from profiler.predict.costs import Curve, price_crossover
from profiler.predict.operator_arrays import Array, StepArrays, operator_arrays, path_of
from profiler.predict.published_efficiency import NO_MIXTURE, WorkAt, basis_for, executed, no_basis
from profiler.quant.registry import published_as
from profiler.rent.offers import Limits, Offer, Planned, Rented, curve, offer, ranked
from profiler.units import duration, scaled

MOST_BATCH = 4096
RENTED_ENGINES: tuple[EngineKind, ...] = ("eager", "compiled")

ANY = Limits()


@dataclass(frozen=True)
class RentRequest:
    """The load to serve, the precisions and engine, and the GPUs with their prices."""

    prompt_len: int = 512
    new_tokens: int = 128
    batch: int | None = None
    limits: Limits = ANY
    quants: tuple[str, ...] = ("none",)
    engine: EngineKind = "eager"
    prices: str = ""
    cards: str = ""
    host_index: float | None = None


def limits_of(ttft_ms: float | None, tpot_ms: float | None) -> Limits:
    """Limits in seconds from milliseconds; None: no limit."""
    return Limits(None if ttft_ms is None else ttft_ms / 1e3, None if tpot_ms is None else tpot_ms / 1e3)


def rent(model: str, request: RentRequest, today: date) -> Rented:
    """The offers of a model on GPUs with a price, ranked.

    Raises RequestError for an impossible request, or if the model fits no GPU or none is fast enough.
    """
    _check(request)
    own_prices = parse_prices(request.prices)
    plans = [plan_of(model, quant, request) for quant in request.quants]
    notes = notes_on(plans)
    sheets = {sheet.gpu: sheet for sheet in gpus()}
    names = [gpu_called(name.strip()).gpu for name in request.cards.split(",") if name.strip()]
    prices = {name: own_prices.get(name) or cheapest(name) for name in names or sheets}
    unpriced = [name for name in names if prices[name] is None]
    if unpriced:
        notes.append(f"no price is known for {', '.join(unpriced)}: give one, --price '{unpriced[0]}=USD_PER_HOUR'.")
    offers: list[Offer] = []
    curves: dict[tuple[str, str], Curve] = {}
    for plan in plans:
        engine = basis_for(plan.format, request.engine)
        if engine is None:
            raise RequestError(f"{model} has {no_basis(plan.precision, request.engine)}")
        notes += [line for line in coverage_sentences(engine, plan.format) if line not in notes]
        for name, price in prices.items():
            if price is None:
                continue
            gpu_curve = curve(plan, sheets[name], price.usd_per_h, engine, request.host_index)
            priced = _priced(name, plan, engine, price, today)
            offers.append(offer(plan, sheets[name], priced, gpu_curve, request.batch, request.limits))
            if gpu_curve.largest:
                curves[name, plan.precision] = gpu_curve
    _refuse(model, request.limits, offers)
    return Rented(
        model, request.prompt_len, request.new_tokens, request.limits, _with_crossovers(ranked(offers), curves),
        curves, tuple(notes),
    )  # fmt: skip


def _check(request: RentRequest) -> None:
    for value, option in ((request.prompt_len, "--prompt"), (request.new_tokens, "--new")):
        if not 1 <= value <= MOST:
            raise RequestError(f"{option}: {value} is not possible; give 1 to {MOST}.")
    if request.batch is not None and not 1 <= request.batch <= MOST_BATCH:
        raise RequestError(f"--batch: {request.batch} is not possible; give 1 to {MOST_BATCH}.")
    for limit, option in ((request.limits.ttft_s, "--max-ttft-ms"), (request.limits.tpot_s, "--max-tpot-ms")):
        if limit is not None and not 0 < limit < math.inf:
            raise RequestError(f"{option}: {1e3 * limit:g} is not possible; give milliseconds above 0.")
    if request.engine not in RENTED_ENGINES:
        raise RequestError(f"--engine {request.engine!r} is unknown here; use {' or '.join(RENTED_ENGINES)}.")
    if request.host_index is not None and not 0 < request.host_index < math.inf:
        raise RequestError("--host-index: give a number above 0, as `roofscope ceilings` prints it.")


def parse_prices(text: str) -> dict[str, Price]:
    """Parse `T4=0.35,H100 SXM=2.99` to prices by GPU. Raises RequestError for an unknown GPU or an invalid price."""
    prices: dict[str, Price] = {}
    for part in (piece.strip() for piece in text.split(",") if piece.strip()):
        name, equals, value = part.rpartition("=")
        if not equals:
            raise RequestError(f"--price {part!r} has no price; give CARD=USD_PER_HOUR, such as 'T4=0.35'.")
        card = gpu_called(name.strip()).gpu
        amount = value.strip().removeprefix("$").removesuffix("USD").strip()
        try:
            usd = float(amount)
        except ValueError:
            raise RequestError(
                f"--price {part!r}: {value.strip()!r} is not a number of USD per hour; convert it."
            ) from None
        if not 0 < usd < float("inf"):
            raise RequestError(f"--price {part!r}: a price must be above 0; leave the card out to use the table.")
        prices[card] = Price(card, "yours", usd, False, None, "", None, "--price")
    return prices


def plan_of(model: str, quant: str, request: RentRequest) -> Planned:
    """The work and memory of a model in one precision at every batch size, counted from its config.

    Raises RequestError for an unknown model, or for more tokens than it has positions.
    """
    counted = counted_model(resolve(model), quant=quant, rented=True)
    tokens = request.prompt_len + request.new_tokens
    check_positions(counted.max_positions, tokens, "a shorter --prompt or fewer --new")
    work, weights = counted.work, counted.weight_bytes
    engine = basis_for(published_as(quant), request.engine)
    path = path_of(engine, counted.attention)
    batches = np.arange(1, MOST_BATCH + 1, dtype=np.int64)
    cores = [op for op in work.operators if isinstance(op, AttentionCore)]
    phase_work: dict[Phase, WorkAt] = {}
    peak_bytes: Array = np.zeros(0)
    for phase in PHASES:
        prefill = phase == "prefill"
        steps = StepArrays(
            prefill=np.full(len(batches), prefill),
            batch=batches,
            prompt_len=np.full(len(batches), request.prompt_len),
            context=np.full(len(batches), 0 if prefill else request.prompt_len + request.new_tokens // 2),
            new_tokens=np.full(len(batches), request.new_tokens),
        )
        needed = operator_arrays(work, steps, dict.fromkeys(PHASES, path), weights)
        phase_work[phase] = executed(needed, engine or "compiled")
        peak_bytes = needed.peak_bytes
    return Planned(
        precision=counted.published or quant,
        format=published_as(quant),
        layers=sum(core.count for core in cores) or max(op.count for op in work.operators),
        prompt_len=request.prompt_len,
        new_tokens=request.new_tokens,
        weight_bytes=float(weights),
        cache_bytes=float(cache_bytes(work, 1, tokens)),
        peak_bytes=peak_bytes,
        work=phase_work,
        mixture=any(isinstance(op, Experts) for op in work.operators),
    )


def notes_on(plans: Sequence[Planned]) -> list[str]:
    """Caveats of the ranges of these plans, as sentences."""
    packed = [plan.precision for plan in plans if plan.format == "dense" and plan.precision != "none"]
    return [
        *(
            f"{form}: the weights as published; the ranges have no figure of it, and assume the efficiency of 16 bits."
            for form in packed
        ),
        *([NO_MIXTURE] if any(plan.mixture for plan in plans) else []),
    ]


def _priced(card: str, plan: Planned, engine: EngineKind, price: Price, today: date) -> Offer:
    """An offer with its price, without times and costs."""
    return Offer(
        card,
        plan.precision,
        engine,
        price.usd_per_h,
        price.provider,
        price.source,
        price.age_days(today),
        price.without,
        price.spot,
        price.vcpus,
        True,
        "",
        machine_cards=price.cards,
        basis=f"the datasheet, with the efficiency of {engine} engines in published figures",
    )


def _refuse(model: str, limits: Limits, offers: list[Offer]) -> None:
    """Raises RequestError if there is no offer, or none that fits, or none that meets the limits."""
    fitting = [each for each in offers if each.fits]
    if not offers:
        raise RequestError("none of these cards has a price; give one: --price 'CARD=USD_PER_HOUR'.")
    if not fitting:
        least = min(offers, key=lambda each: (each.why, each.card))
        sheets = {sheet.gpu: sheet for sheet in gpus()}
        largest = max((sheets[each.card] for each in offers), key=lambda sheet: sheet.memory_bytes)
        raise RequestError(
            f"{model} fits no card that has a price: in {_words(least.precision)} it {least.why.split(';')[0]}; the"
            f" largest, {largest.gpu}, has {scaled(largest.memory_bytes, 'B')}. Try --quant nf4, --engine"
            " compiled --quant int4wo, or a smaller --batch."
        )
    if all(each.meets == "no" for each in fitting):
        fastest = min(
            fitting,
            key=lambda each: max(
                (each.tpot_s.typical / limits.tpot_s) if each.tpot_s and limits.tpot_s else 0.0,
                (each.ttft_s.typical / limits.ttft_s) if each.ttft_s and limits.ttft_s else 0.0,
            ),
        )
        assert fastest.ttft_s is not None
        assert fastest.tpot_s is not None
        raise RequestError(
            f"no card meets the limits: the fastest, {fastest.card} in {_words(fastest.precision)}, typically takes"
            f" {duration(fastest.ttft_s.typical)} to the first token and {duration(fastest.tpot_s.typical)} per token"
            f" at batch {fastest.batch}. Relax the limits, or try --engine compiled --quant int4wo."
        )


def _words(precision: str) -> str:
    return "16 bits" if precision == "none" else precision


def _with_crossovers(offers: tuple[Offer, ...], curves: Mapping[tuple[str, str], Curve]) -> tuple[Offer, ...]:
    """The offers, each with the batch at which it undercuts the next cheaper GPU per hour in its precision."""
    crossovers: dict[tuple[str, str], tuple[int | None, str]] = {}
    for precision in dict.fromkeys(each.precision for each in offers):
        ladder = sorted(
            (each for each in offers if each.precision == precision and each.fits), key=lambda each: each.usd_per_h
        )
        for cheaper, dearer in pairwise(ladder):
            batch = price_crossover(curves[dearer.card, precision], curves[cheaper.card, precision])
            crossovers[dearer.card, precision] = (batch, cheaper.card)
    with_crossovers = []
    for each in offers:
        batch, cheaper_card = crossovers.get((each.card, each.precision), (None, ""))
        with_crossovers.append(replace(each, crossover_batch=batch, crossover_from=cheaper_card))
    return tuple(with_crossovers)
