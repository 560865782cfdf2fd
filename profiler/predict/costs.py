"""Cost per token on a rented GPU, over the number of sequences in flight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from profiler.predict.operator_arrays import Array
from profiler.predict.published_efficiency import Range

_MILLION = 1e6

_BATCHES_A_LINE = 60


@dataclass(frozen=True)
class Span:
    """A figure with the range that holds nine in ten."""

    low: float
    typical: float
    high: float

    def times(self, factor: float) -> Span:
        """This span in another unit."""
        return Span(factor * self.low, factor * self.typical, factor * self.high)

    @property
    def ends(self) -> tuple[float, float, float]:
        return self.low, self.typical, self.high

    def overlaps(self, other: Span) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Cost:
    """USD a million tokens at a load: that share of the batch is in flight."""

    load: float
    batch: int
    input: Span
    output: Span


@dataclass(frozen=True)
class Curve:
    """A card's ranges at every batch size that fits it."""

    card: str
    usd_per_s: float
    ttft: Range
    tpot: Range
    largest: int

    def output_usd(self) -> Array:
        """USD of one output token at each batch size."""
        return np.asarray(self.usd_per_s * self.tpot.typical_s / np.arange(1, self.largest + 1))


@dataclass(frozen=True)
class CostLine:
    """What an output token costs on one card in one precision, over the sequences in flight."""

    card: str
    precision: str
    usd_per_h: float
    batches: tuple[int, ...]
    usd_per_million: tuple[Span, ...]
    crossover_batch: int | None
    """From here on it undercuts a card of these that is cheaper an hour."""

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be drawn: a kept file may hold anything."""
        ends = [end for span in self.usd_per_million for end in span.ends]
        drawable = self.batches and len(self.batches) == len(self.usd_per_million)
        if not drawable or not all(0 < value < math.inf for value in (*self.batches, *ends)):
            raise ValueError("a line of costs has a positive cost for every batch")


@dataclass(frozen=True)
class CostOverLoad:
    """The best offers of an answer as lines over the load."""

    model: str
    prompt_len: int
    new_tokens: int
    lines: tuple[CostLine, ...]


def cost_line(curve: Curve, precision: str, usd_per_h: float, crossover_batch: int | None) -> CostLine:
    """USD a million output tokens on a card, at batches evenly apart by their logarithm and at its crossover."""
    sizes = np.geomspace(1, curve.largest, _BATCHES_A_LINE).astype(int)
    batches = np.unique(np.append(sizes, [crossover_batch or 1]))
    factor, tpot = _MILLION * curve.usd_per_s / batches, curve.tpot
    times_s = (tpot.low_s[batches - 1], tpot.typical_s[batches - 1], tpot.high_s[batches - 1])
    spans = zip(*(factor * time_s for time_s in times_s), strict=True)
    return CostLine(
        curve.card,
        precision,
        usd_per_h,
        tuple(map(int, batches)),
        tuple(Span(*map(float, span)) for span in spans),
        crossover_batch,
    )


def price_crossover(dearer: Curve, cheaper: Curve) -> int | None:
    """The batch from which a token costs less on the card that is dearer an hour; None: it never does.

    More sequences than the cheaper card holds wait for it, or for another one of its kind: its cost a token stays.
    """
    theirs = cheaper.output_usd()
    batches = np.arange(1, dearer.largest + 1)
    undercuts = dearer.output_usd() < theirs[np.minimum(batches, cheaper.largest) - 1]
    if not undercuts.any() or not undercuts[-1]:
        return None
    never = np.flatnonzero(~undercuts)
    return int(never[-1]) + 2 if len(never) else 1


def cost_at(made: Curve, load: float, full: int, prompt_len: int) -> Cost:
    """Of a prompt's and of an output token where `load` of `full` sequences are in flight."""
    batch = max(1, round(load * full))
    usd = made.usd_per_s * _MILLION
    return Cost(
        load,
        batch,
        span_at(made.ttft, batch).times(usd / (batch * prompt_len)),
        span_at(made.tpot, batch).times(usd / batch),
    )


def span_at(told: Range, batch: int) -> Span:
    """A range's figure at one batch size."""
    at = batch - 1
    return Span(float(told.low_s[at]), float(told.typical_s[at]), float(told.high_s[at]))
