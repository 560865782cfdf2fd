"""Leave-one-out test of the published figures: each compared with a range made without its GPU, or its model."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import cache

from profiler.data.published_results import Published, published
from profiler.predict.published_efficiency import attained_by, family_of, steps_of, strays


@dataclass(frozen=True)
class LeftOut:
    """A figure, compared with the range for its step that only the other figures give."""

    point: Published
    inside: bool
    width: float
    """The range's upper end / its lower end."""


def family(point: Published) -> str:
    return family_of(point.format, point.batch, point.query_tokens)


@cache
def left_out() -> tuple[LeftOut, ...]:
    """Every published figure twice: compared with the range without its GPU, and with the one without its model."""
    results: list[LeftOut] = []
    for name in ("gpu", "model"):
        for value in sorted({getattr(point, name) for point in published()}):
            held_out = [point for point in published() if getattr(point, name) == value]
            others = [point for point in published() if getattr(point, name) != value]
            for kind in sorted({point.kind for point in held_out} & {point.kind for point in others}):
                spread = strays(others, kind)
                for family_name in sorted({family(point) for point in held_out if point.kind == kind}):
                    efficiency = attained_by(others, kind, family_name, spread)
                    for point in held_out:
                        if point.kind == kind and family(point) == family_name:
                            span = efficiency.range_s(steps_of([point]), point.phase)
                            low, high = float(span.low_s[0]), float(span.high_s[0])
                            results.append(LeftOut(point, 0.999 * low <= point.latency_s <= 1.001 * high, high / low))
    return tuple(results)


def as_published_again() -> list[float]:
    """Distances |log| of compiled decode figures from the median of what other engines or sources publish.

    Compares figures of the same GPU, model, format and batch that stream nearly as many bytes. No model of GPUs and
    models can come nearer than these.
    """
    distances: list[float] = []
    decodes = [point for point in published() if point.kind == "compiled" and point.phase == "decode"]
    for point in decodes:
        replicas = [
            math.log(other.latency_s / _bytes(other))
            for other in decodes
            if _cell(other) == _cell(point)
            and (other.engine, other.source) != (point.engine, point.source)
            and abs(math.log(_bytes(other) / _bytes(point))) < _MOST_LOG_BYTES
        ]
        if replicas:
            distances.append(abs(math.log(point.latency_s / _bytes(point)) - statistics.median(replicas)))
    return distances


_MOST_LOG_BYTES = 0.1
"""Two figures stream nearly as many bytes if the log of their ratio is below this."""


def _cell(point: Published) -> tuple[str, str, str, int]:
    return point.gpu, point.model, point.format, point.batch


def _bytes(point: Published) -> float:
    return point.weight_bytes + point.kv_bytes
