"""`rent`: what a model's tokens cost on every GPU with a price, by the ranges of `forecast MODEL --on GPU`.

The prompts of a batch start together. So the time to the first token is that of the batch's prefill, and a batch of n
sequences gives n x N tokens in TTFT + (N - 1) x TPOT, where N are the new tokens after each prompt.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from profiler.counting.cache import counted_model
from profiler.counting.preset_counts import CountedModel
from profiler.data.datasheets import gpu_called
from profiler.data.prices import Price, newest_prices
from profiler.data.published_results import MIXTURE, coverage_sentences, formats_of, published
from profiler.errors import RequestError
from profiler.grid.cells import Grid
from profiler.grid.ranges import check_positions
from profiler.json_document import Document
from profiler.loading.source import resolve
from profiler.predict.operator_arrays import StepArrays
from profiler.predict.published_efficiency import form_of, no_basis, steps_by_datasheet
from profiler.quant.registry import published_as
from profiler.rent.options import MOST_BATCH, RentOptions
from profiler.units import scaled, short_count

_NEAR = 1.5
"""A model's size is covered up to this factor beyond the sizes of the published figures."""
_MOST_REASONS = 3
"""GPUs whose reason is named where none fits."""

Meets = Literal["yes", "cannot tell", "no"]


@dataclass(frozen=True)
class Span:
    """A figure with its 90 % range."""

    low: float
    typical: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Offer(Price):
    """A model on one GPU, at one price."""

    fits: bool
    """Whether one sequence fits the memory, and the engine runs there."""
    why: str
    """The memory that the model needs, or the reason why it does not fit or run."""
    meets: Meets = "no"
    """Whether `batch` is within the limits: `cannot tell` if only a part of its range is."""
    batch: int = 0
    """The largest batch within the limits over its whole range; 1 if there is none, 0 if not even one fits."""
    ttft_s: Span | None = None
    """Seconds to the first token, which those of the whole batch wait for; null where the model does not fit."""
    tpot_s: Span | None = None
    """Seconds per further token: of the decode step in the middle of the answer."""
    tokens_per_s: Span | None = None
    """New tokens per second of the batch, prefill included."""
    usd_per_million_tokens: Span | None = None
    """USD per million new tokens, prefill included."""


@dataclass(frozen=True)
class RentDocument(Document):
    """`roofscope rent --format json`."""

    model: str
    precision: str
    """`16 bits`, or a format of `--quant`, or the packed format in which the weights are published."""
    engine: str
    prompt_len: int
    new_tokens: int
    max_ttft_s: float | None
    max_tpot_s: float | None
    gpus: Sequence[Offer]
    """Within the limits first, then those that may be, each by typical cost; those that do not fit are last."""
    notes: Sequence[str]


def rent(request: RentOptions) -> RentDocument:
    """The model on each GPU with a price of its own or in the table, with the largest batch within the limits.

    Raises RequestError for an impossible request, or if the model fits no GPU, or no published figure covers it.
    """
    if published_as(request.quant) not in formats_of(request.kind):
        raise RequestError(f"{request.model} has {no_basis(request.quant, request.kind)}")
    counted = counted_model(resolve(request.model), quant=request.quant, rented=True)
    check_positions(counted.max_positions, request.prompt + request.new, "a shorter --prompt or fewer --new")
    steps = StepArrays.of(Grid((request.prompt,), tuple(range(1, MOST_BATCH + 1)), request.new).keys)
    offers = [_offer(price, counted, request, steps) for price in request.own_prices or newest_prices().values()]
    if not any(offer.fits for offer in offers):
        largest = sorted(offers, key=lambda offer: -gpu_called(offer.gpu).room_bytes)[:_MOST_REASONS]
        reasons = ", ".join(f"{offer.gpu} {offer.why}" for offer in largest)
        raise RequestError(f"{request.model} fits no GPU that has a price: {reasons}; use another --quant or --engine.")
    max_ttft_s, max_tpot_s = request.limits_s
    return RentDocument(
        model=request.model,
        precision=counted.published or (request.quant if request.quant != "none" else "16 bits"),
        engine=request.kind,
        prompt_len=request.prompt,
        new_tokens=request.new,
        max_ttft_s=max_ttft_s,
        max_tpot_s=max_tpot_s,
        gpus=sorted(offers, key=_rank),
        notes=list(_notes(counted, request, max(offer.batch for offer in offers))),
    )


def _rank(offer: Offer) -> tuple[int, float]:
    cost = offer.usd_per_million_tokens
    return ("yes", "cannot tell", "no").index(offer.meets), cost.typical if cost else math.inf


def _offer(price: Price, counted: CountedModel, request: RentOptions, steps: StepArrays) -> Offer:
    """The model on one GPU; `steps` are the prefill and the decode of every batch size from 1.

    A GPU without units for the model's dtype runs it in its own dtype of 16 bits, as in `forecast --on`.
    """
    sheet = gpu_called(price.gpu)
    if sheet.peak_flops_per_s(counted.dtype) is None:
        counted = replace(counted, dtype=sheet.sustained_dtype)
    try:
        found = steps_by_datasheet(counted, request.quant, sheet, steps, request.kind)
    except RequestError as error:
        return Offer(**vars(price), fits=False, why=str(error).removeprefix(sheet.gpu).lstrip(": ").partition(";")[0])
    one = found.needed.need.at(np.array(0))
    # Largest batches are those of `count`: they run in whatever pieces free memory is.
    largest = int(np.sum(found.needed.need.safe_bytes[steps.prefill] <= sheet.room_bytes))
    if not largest:
        return Offer(
            **vars(price),
            fits=False,
            why=f"needs {scaled(float(one.safe_bytes), 'B')}, has {scaled(sheet.room_bytes, 'B')} free",
        )
    ends = [
        (end_s[steps.prefill][:largest], end_s[~steps.prefill][:largest])
        for end_s in (found.times.low_s, found.times.typical_s, found.times.high_s)
    ]
    most_ttft_s, most_tpot_s = (limit or math.inf for limit in request.limits_s)
    within = [np.flatnonzero((ttft <= most_ttft_s) & (tpot <= most_tpot_s)) for ttft, tpot in ends]
    batch = int(within[2][-1]) + 1 if len(within[2]) else 1
    seconds = [(float(ttft_s[batch - 1]), float(tpot_s[batch - 1])) for ttft_s, tpot_s in ends]
    rates = [batch * request.new / (ttft_s + (request.new - 1) * tpot_s) for ttft_s, tpot_s in seconds]
    return Offer(
        **vars(price),
        fits=True,
        why=f"weights {scaled(counted.weight_bytes, 'B')}, KV cache {scaled(float(one.cache_bytes), 'B')} per sequence",
        meets="yes" if len(within[2]) else "cannot tell" if 0 in within[0] else "no",
        batch=batch,
        ttft_s=Span(*(ttft_s for ttft_s, _ in seconds)),
        tpot_s=Span(*(tpot_s for _, tpot_s in seconds)),
        tokens_per_s=Span(*reversed(rates)),
        usd_per_million_tokens=Span(*(1e6 * price.usd_per_h / 3600 / rate for rate in rates)),
    )


def _notes(counted: CountedModel, request: RentOptions, largest: int) -> Iterator[str]:
    """What the ranges rest on, and their caveats, as sentences."""
    form, own = form_of(counted, request.quant), counted.work.params
    yield from coverage_sentences(request.kind, form)
    covered = [point for point in published() if (point.kind, point.form) == (request.kind, form)]
    if largest > (most := max(point.batch for point in covered)):
        yield f"Published up to batch {most}, beyond which the efficiency is assumed to be the same."
    if largest == MOST_BATCH:
        yield f"No batch above {MOST_BATCH:,} is computed."
    alike = MIXTURE if form == MIXTURE else "dense"
    sizes = [point.weights for point in published() if (point.kind, point.form) == (request.kind, alike)]
    if not min(sizes) / _NEAR <= own <= max(sizes) * _NEAR:
        yield (
            f"No figure of a model of its size is published for this engine: those have {short_count(min(sizes))} to"
            f" {short_count(max(sizes))} weights, this one {short_count(own)}. The ranges may not hold."
        )
    if counted.published and all(point.format != counted.published for point in covered):
        yield (
            f"{counted.published}: the weights as published; the ranges have no figure of it, and assume the efficiency"
            " of 16 bits."
        )
