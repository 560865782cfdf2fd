"""`rent`: every GPU that has a price, in every precision asked for."""

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
from profiler.data.published_results import EngineKind
from profiler.errors import RequestError
from profiler.grid.cells import PHASES, Phase
from profiler.grid.ranges import MOST, check_positions
from profiler.loading.source import resolve
from profiler.predict.costs import Curve, price_crossover
from profiler.predict.operator_arrays import Array, StepArrays, operator_arrays, path_of
from profiler.predict.published_efficiency import NO_MIXTURE, WorkAt, basis_for, executed
from profiler.quant.registry import published_as
from profiler.rent.offers import Limits, Offer, Planned, Rented, curve, offer, ranked
from profiler.units import duration, scaled

MOST_BATCH = 4096
RENTED_ENGINES: tuple[EngineKind, ...] = ("eager", "compiled")

ANY = Limits()


@dataclass(frozen=True)
class RentRequest:
    """What is to be served, and how."""

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
    """Limits as the command line gives them."""
    return Limits(None if ttft_ms is None else ttft_ms / 1e3, None if tpot_ms is None else tpot_ms / 1e3)


def rent(model: str, asked: RentRequest, today: date) -> Rented:
    """Every card with a price. Raises RequestError where nothing fits, or nothing is fast enough."""
    _check(asked)
    own = parse_prices(asked.prices)
    plans = [plan_of(model, quant, asked) for quant in asked.quants]
    notes = notes_on(plans)
    sheets = {sheet.gpu: sheet for sheet in gpus()}
    wanted = [gpu_called(name.strip()).gpu for name in asked.cards.split(",") if name.strip()] or list(sheets)
    offers: list[Offer] = []
    curves: dict[tuple[str, str], Curve] = {}
    notes += _without_price([card for card in wanted if asked.cards and not (card in own or cheapest(card))])
    for plan in plans:
        engine = basis_for(plan.format, asked.engine)
        if engine is None:
            raise RequestError(
                f"--quant {plan.precision}: no published figure on several cards tells what it attains; use"
                " none, nf4, int8wo, int4wo or fp8, or forecast a run of it."
            )
        if engine != asked.engine:
            notes.append(
                f"{plan.precision} as {engine} engines run it: no figure of {asked.engine} transformers is known."
            )
        for card in wanted:
            price = own.get(card) or cheapest(card)
            if price is None:
                continue
            made = curve(plan, sheets[card], price.usd_per_h, engine, asked.host_index)
            bare = _bare(card, plan, engine, price, today)
            offers.append(offer(plan, sheets[card], bare, made, asked.batch, asked.limits))
            if made.largest:
                curves[card, plan.precision] = made
    _refuse(model, asked, offers)
    return Rented(
        model, asked.prompt_len, asked.new_tokens, asked.limits, _with_crossovers(ranked(offers), curves), curves,
        tuple(notes),
    )  # fmt: skip


def _check(asked: RentRequest) -> None:
    for value, option in ((asked.prompt_len, "--prompt"), (asked.new_tokens, "--new")):
        if not 1 <= value <= MOST:
            raise RequestError(f"{option}: {value} is not possible; give 1 to {MOST}.")
    if asked.batch is not None and not 1 <= asked.batch <= MOST_BATCH:
        raise RequestError(f"--batch: {asked.batch} is not possible; give 1 to {MOST_BATCH}.")
    for limit, option in ((asked.limits.ttft_s, "--max-ttft-ms"), (asked.limits.tpot_s, "--max-tpot-ms")):
        if limit is not None and not 0 < limit < math.inf:
            raise RequestError(f"{option}: {1e3 * limit:g} is not possible; give milliseconds above 0.")
    if asked.engine not in RENTED_ENGINES:
        raise RequestError(f"--engine {asked.engine!r} is unknown here; use {' or '.join(RENTED_ENGINES)}.")
    if asked.host_index is not None and not 0 < asked.host_index < math.inf:
        raise RequestError("--host-index: give a number above 0, as `roofscope ceilings` tells it.")


def parse_prices(text: str) -> dict[str, Price]:
    """`T4=0.35,H100 SXM=2.99` as prices by card. Raises RequestError."""
    found: dict[str, Price] = {}
    for part in (piece.strip() for piece in text.split(",") if piece.strip()):
        name, equals, value = part.rpartition("=")
        if not equals:
            raise RequestError(f"--price {part!r} names no price; give CARD=USD_PER_HOUR, such as 'T4=0.35'.")
        card = gpu_called(name.strip()).gpu
        amount = value.strip().removeprefix("$").removesuffix("USD").strip()
        try:
            usd = float(amount)
        except ValueError:
            raise RequestError(
                f"--price {part!r}: {value.strip()!r} is no number of USD an hour; convert it."
            ) from None
        if not 0 < usd < float("inf"):
            raise RequestError(f"--price {part!r}: a price is above 0; leave the card out to use the table.")
        found[card] = Price(card, "yours", usd, False, None, "", None, "--price")
    return found


def plan_of(model: str, quant: str, asked: RentRequest) -> Planned:
    """A model in one precision, counted at every batch size from its config alone."""
    counted = counted_model(resolve(model), quant=quant, rented=True)
    check_positions(counted.max_positions, asked.prompt_len + asked.new_tokens, "a shorter --prompt or fewer --new")
    work, weights = counted.work, counted.weight_bytes
    engine = basis_for(published_as(quant), asked.engine)
    path = path_of(engine, counted.attention)
    batches = np.arange(1, MOST_BATCH + 1, dtype=np.int64)
    cores = [op for op in work.operators if isinstance(op, AttentionCore)]
    at: dict[Phase, WorkAt] = {}
    peak: Array = np.zeros(0)
    for phase in PHASES:
        prefill = phase == "prefill"
        steps = StepArrays(
            prefill=np.full(len(batches), prefill),
            batch=batches,
            prompt_len=np.full(len(batches), asked.prompt_len),
            context=np.full(len(batches), 0 if prefill else asked.prompt_len + asked.new_tokens // 2),
            new_tokens=np.full(len(batches), asked.new_tokens),
        )
        needed = operator_arrays(work, steps, dict.fromkeys(PHASES, path), weights)
        at[phase] = executed(needed, engine or "compiled")
        peak = needed.peak_bytes
    return Planned(
        precision=counted.published or quant,
        format=published_as(quant),
        layers=sum(core.count for core in cores) or max(op.count for op in work.operators),
        prompt_len=asked.prompt_len,
        new_tokens=asked.new_tokens,
        weight_bytes=float(weights),
        cache_bytes=float(cache_bytes(work, 1, asked.prompt_len + asked.new_tokens)),
        peak_bytes=peak,
        work=at,
        mixture=any(isinstance(op, Experts) for op in work.operators),
    )


def notes_on(plans: Sequence[Planned]) -> list[str]:
    """What is said of the ranges of these plans, beside that they hold nine in ten."""
    packed = [plan.precision for plan in plans if plan.format == "dense" and plan.precision != "none"]
    return [
        *(
            f"{form}: the weights as published; no figure of it is behind the ranges, which take it for 16 bits."
            for form in packed
        ),
        *([NO_MIXTURE] if any(plan.mixture for plan in plans) else []),
    ]


def _without_price(cards: list[str]) -> list[str]:
    """What is said of cards that were asked for by name and have no price."""
    if not cards:
        return []
    return [f"no price is known of {', '.join(cards)}: give one, --price '{cards[0]}=USD_PER_HOUR'."]


def _bare(card: str, plan: Planned, engine: EngineKind, price: Price, today: date) -> Offer:
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
        basis=f"the datasheet, at what {engine} engines attain in published figures",
    )


def _refuse(model: str, asked: RentRequest, offers: list[Offer]) -> None:
    able = [each for each in offers if each.fits]
    if not offers:
        raise RequestError("none of these cards has a price; give one: --price 'CARD=USD_PER_HOUR'.")
    if not able:
        least = min(offers, key=lambda each: (each.why, each.card))
        sheets = {sheet.gpu: sheet for sheet in gpus()}
        largest = max((sheets[each.card] for each in offers), key=lambda sheet: sheet.memory_bytes)
        raise RequestError(
            f"{model} fits no card that has a price: in {_words(least.precision)} it {least.why.split(';')[0]}; the"
            f" largest, {largest.gpu}, has {scaled(largest.memory_bytes, 'B')}. Try --quant nf4,int4wo or a smaller"
            " --batch."
        )
    if all(each.meets == "no" for each in able):
        limits = asked.limits
        fastest = min(
            able,
            key=lambda each: max(
                (each.tpot_s.typical / limits.tpot_s) if each.tpot_s and limits.tpot_s else 0.0,
                (each.ttft_s.typical / limits.ttft_s) if each.ttft_s and limits.ttft_s else 0.0,
            ),
        )
        assert fastest.ttft_s is not None
        assert fastest.tpot_s is not None
        raise RequestError(
            f"no card is known to be so fast: {fastest.card} in {_words(fastest.precision)}, the fastest, typically"
            f" takes {duration(fastest.ttft_s.typical)} to the first token and"
            f" {duration(fastest.tpot_s.typical)} a token at batch {fastest.batch}. Relax the limits, or try --engine"
            " compiled or --quant int4wo."
        )


def _words(precision: str) -> str:
    return "16 bits" if precision == "none" else precision


def _with_crossovers(offers: tuple[Offer, ...], curves: Mapping[tuple[str, str], Curve]) -> tuple[Offer, ...]:
    """Each card against its neighbour in price an hour, in the same precision."""
    found: dict[tuple[str, str], tuple[int | None, str]] = {}
    for precision in dict.fromkeys(each.precision for each in offers):
        ladder = sorted(
            (each for each in offers if each.precision == precision and each.fits), key=lambda each: each.usd_per_h
        )
        for cheaper, dearer in pairwise(ladder):
            at = price_crossover(curves[dearer.card, precision], curves[cheaper.card, precision])
            found[dearer.card, precision] = (at, cheaper.card)
    told = []
    for each in offers:
        at, cheaper_card = found.get((each.card, each.precision), (None, ""))
        told.append(replace(each, crossover_batch=at, crossover_from=cheaper_card))
    return tuple(told)
