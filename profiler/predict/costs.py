"""Cost of requests on rented GPUs, over the requests per second."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
class CostLine:
    """USD per thousand requests on one kind of GPU, over the requests per second; as many GPUs as each rate needs."""

    name: str
    """The GPUs of one replica, the precision, and the engine where lines have different ones."""
    usd_per_h: float
    """Of one GPU."""
    rates_per_s: tuple[float, ...]
    usd_per_thousand: tuple[Span, ...]
    crossover_per_s: float | None
    """The rate above which it first costs less than the next cheaper line per hour."""

    def __post_init__(self) -> None:
        """Raises ValueError for a line that cannot be drawn, since a file may contain any values."""
        ends = [end for span in self.usd_per_thousand for end in span.ends]
        drawable = self.rates_per_s and len(self.rates_per_s) == len(self.usd_per_thousand)
        if not drawable or not all(0 < value < math.inf for value in (*self.rates_per_s, *ends)):
            raise ValueError("a line of costs has a positive cost for every rate")


@dataclass(frozen=True)
class CostOverLoad:
    """Cost over the load, one line per offer."""

    title: str
    """The model, the engine, the lengths, the limits and the class of the prices."""
    rate_per_s: float | None
    """The requested rate; None without one."""
    lines: tuple[CostLine, ...]
