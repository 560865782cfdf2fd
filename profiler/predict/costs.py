"""Cost per token on a rented GPU, over the number of sequences in flight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from profiler.predict.operator_arrays import Array
from profiler.predict.published_efficiency import Range

_MILLION = 1e6
_BATCHES_PER_LINE = 60


@dataclass(frozen=True)
class Span:
    """A figure with its 90 % range."""

    low: float
    typical: float
    high: float

    def times(self, factor: float) -> Span:
        """The span multiplied by `factor`, as for another unit."""
        return Span(factor * self.low, factor * self.typical, factor * self.high)

    @property
    def ends(self) -> tuple[float, float, float]:
        return self.low, self.typical, self.high

    def overlaps(self, other: Span) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Cost:
    """USD per million input and output tokens, with a share `load` of the largest batch in flight."""

    load: float
    batch: int
    input: Span
    output: Span


@dataclass(frozen=True)
class Curve:
    """The ranges of a GPU at every batch size that fits, from 1 to `largest`."""

    card: str
    usd_per_s: float
    ttft: Range
    tpot: Range
    largest: int

    def output_usd(self) -> Array:
        """USD per output token at each batch size [largest]."""
        return np.asarray(self.usd_per_s * self.tpot.typical_s / np.arange(1, self.largest + 1))


@dataclass(frozen=True)
class CostLine:
    """Cost of an output token on one GPU in one precision, over the sequences in flight."""

    card: str
    precision: str
    usd_per_h: float
    batches: tuple[int, ...]
    usd_per_million: tuple[Span, ...]
    crossover_batch: int | None
    """The batch from which it costs less than one of the other GPUs that is cheaper per hour."""

    def __post_init__(self) -> None:
        """Raises ValueError for a line that cannot be drawn, since a file may contain any values."""
        ends = [end for span in self.usd_per_million for end in span.ends]
        drawable = self.batches and len(self.batches) == len(self.usd_per_million)
        if not drawable or not all(0 < value < math.inf for value in (*self.batches, *ends)):
            raise ValueError("a line of costs has a positive cost for every batch")


@dataclass(frozen=True)
class CostOverLoad:
    """Cost over the load, one line per offer."""

    model: str
    prompt_len: int
    new_tokens: int
    lines: tuple[CostLine, ...]


def cost_line(curve: Curve, precision: str, usd_per_h: float, crossover_batch: int | None) -> CostLine:
    """USD per million output tokens on a GPU, at log-spaced batches and at its crossover."""
    sizes = np.geomspace(1, curve.largest, _BATCHES_PER_LINE).astype(int)
    batches = np.unique(np.append(sizes, [crossover_batch or 1])).tolist()
    spans = tuple(span_at(curve.tpot, batch).times(_MILLION * curve.usd_per_s / batch) for batch in batches)
    return CostLine(curve.card, precision, usd_per_h, tuple(batches), spans, crossover_batch)


def price_crossover(dearer: Curve, cheaper: Curve) -> int | None:
    """The batch from which a token costs less on the GPU that costs more per hour; None if there is none.

    Sequences beyond the cheaper GPU's largest batch wait, or run on a second one, so its cost per token stays constant.
    """
    cheaper_usd = cheaper.output_usd()
    batches = np.arange(1, dearer.largest + 1)
    undercuts = dearer.output_usd() < cheaper_usd[np.minimum(batches, cheaper.largest) - 1]
    if not undercuts[-1:].any():
        return None
    at_least_as_dear = np.flatnonzero(~undercuts)
    return int(at_least_as_dear[-1]) + 2 if len(at_least_as_dear) else 1


def cost_at(curve: Curve, load: float, full: int, prompt_len: int) -> Cost:
    """Cost of a prompt token and of an output token, with a share `load` of `full` sequences in flight."""
    batch = max(1, round(load * full))
    usd = curve.usd_per_s * _MILLION
    return Cost(
        load,
        batch,
        span_at(curve.ttft, batch).times(usd / (batch * prompt_len)),
        span_at(curve.tpot, batch).times(usd / batch),
    )


def span_at(seconds: Range, batch: int) -> Span:
    """The span of a range at one batch size."""
    index = batch - 1
    return Span(float(seconds.low_s[index]), float(seconds.typical_s[index]), float(seconds.high_s[index]))
