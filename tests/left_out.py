"""Published figures against ranges that have not seen their card, or their model."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import cache

from profiler.data.published_results import Published, published
from profiler.predict.published_efficiency import attained_by, family_of, steps_of, strays


@dataclass(frozen=True)
class LeftOut:
    """A figure, and the range of its step from others' figures alone."""

    point: Published
    inside: bool
    width: float
    """Upper over lower."""


def family(point: Published) -> str:
    return family_of(point.format, point.batch, point.query_tokens)


@cache
def left_out() -> tuple[LeftOut, ...]:
    """Every published figure twice: by the range without its card and by the one without its model."""
    found: list[LeftOut] = []
    for name in ("gpu", "model"):
        for value in sorted({getattr(point, name) for point in published()}):
            mine = [point for point in published() if getattr(point, name) == value]
            others = [point for point in published() if getattr(point, name) != value]
            for kind in sorted({point.kind for point in mine} & {point.kind for point in others}):
                strayed = strays(others, kind)
                for name_of in sorted({family(point) for point in mine if point.kind == kind}):
                    told = attained_by(others, kind, name_of, strayed)
                    for point in mine:
                        if point.kind == kind and family(point) == name_of:
                            span = told.range_s(steps_of([point]), point.phase)
                            low, high = float(span.low_s[0]), float(span.high_s[0])
                            found.append(LeftOut(point, 0.999 * low <= point.latency_s <= 1.001 * high, high / low))
    return tuple(found)


def as_published_again() -> list[float]:
    """How far, as |log|, figures of compiled decodes lie from the median of what other engines or sources publish of
    the same card, model, format and batch, with nearly as much to stream: no model of cards and models is nearer."""
    found: list[float] = []
    of_kind = [point for point in published() if point.kind == "compiled" and point.phase == "decode"]
    for point in of_kind:
        again = [
            math.log(other.latency_s / _bytes(other))
            for other in of_kind
            if _cell(other) == _cell(point)
            and (other.engine, other.source) != (point.engine, point.source)
            and abs(math.log(_bytes(other) / _bytes(point))) < _NEAR
        ]
        if again:
            found.append(abs(math.log(point.latency_s / _bytes(point)) - statistics.median(again)))
    return found


_NEAR = 0.1


def _cell(point: Published) -> tuple[str, str, str, int]:
    return point.gpu, point.model, point.format, point.batch


def _bytes(point: Published) -> float:
    return point.weight_bytes + point.kv_bytes
