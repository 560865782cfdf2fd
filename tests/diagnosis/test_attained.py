"""Published figures against ranges that have not seen their card, or their model."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from profiler.diagnosis.attained import (
    Shares,
    Steps,
    Stray,
    attained,
    attained_by,
    family_of,
    fitted,
    steps_of,
    strays,
)
from profiler.machine.published import Published, published


def family(point: Published) -> str:
    return family_of(point.format, point.batch, point.query_tokens)


@pytest.fixture(scope="module")
def left_out() -> list[tuple[Published, bool, float]]:
    """Every published figure twice, by ranges without its card and without its model: (it, inside, upper / lower)."""
    found = []
    for name in ("gpu", "model"):
        for value in sorted({getattr(point, name) for point in published()}):
            inside = [point for point in published() if getattr(point, name) == value]
            others = [point for point in published() if getattr(point, name) != value]
            strayed: dict[str, list[Stray]] = {}
            for point in inside:
                if not any(other.kind == point.kind for other in others):
                    continue
                known = strayed.setdefault(point.kind, strays(others, point.kind))
                told = attained_by(others, point.kind, family(point), known).range_s(steps_of([point]), point.phase)
                low, high = float(told.low_s[0]), float(told.high_s[0])
                found.append((point, 0.999 * low <= point.latency_s <= 1.001 * high, high / low))
    return found


@pytest.mark.slow
def test_ranges_hold_nine_in_ten_of_what_they_have_not_seen(left_out: list[tuple[Published, bool, float]]) -> None:
    assert len(left_out) > 300
    assert statistics.mean(inside for _, inside, _ in left_out) >= 0.9
    # Compiled engines' are wider than wished for: 1.5 is not reached with so few cards.
    for kind, most in (("eager", 2.0), ("compiled", 2.4)):
        dense = [
            width
            for point, _, width in left_out
            if point.kind == kind and point.format == "dense" and point.phase == "decode"
        ]
        assert 1.2 < statistics.median(dense) < most


def test_a_planted_engine_is_found_again() -> None:
    """Figures made of known shares on the published cards, without noise."""
    truth = Shares(memory=0.62, compute=0.45, layer_s=3e-4)
    points = [point for point in published() if point.kind == "compiled"]
    seconds = truth.step_s(steps_of(points))
    from dataclasses import replace

    planted = [replace(point, latency_s=float(value)) for point, value in zip(points, seconds, strict=True)]
    found = fitted(planted, Shares(0.75, 0.60, 1.5e-4))
    assert found.memory == pytest.approx(truth.memory, rel=0.05)
    assert found.compute == pytest.approx(truth.compute, rel=0.05)
    assert found.layer_s == pytest.approx(truth.layer_s, rel=0.12)


def test_no_figure_beats_its_datasheet() -> None:
    """A step below its card's own floor would be a wrong row, a wrong format or a wrong peak. gpt-fast's authors give
    104.9 tokens/s of Llama-2-7B on an A100 as 1397 GB/s, 69 % of 2039 (gpt-fast, README)."""
    floors = steps_of(published()).floor_s()
    for point, floor in zip(published(), floors, strict=True):
        assert point.latency_s > 0.98 * floor, point
    [known] = [point for point in published() if math.isclose(1 / point.latency_s, 104.9, rel_tol=1e-4)]
    assert known.weight_bytes / known.latency_s == pytest.approx(1397e9, rel=0.02)


def test_a_range_stands_above_the_floor_and_takes_the_host_in() -> None:
    told = attained("eager", "dense")
    one = np.ones(1)
    small = Steps(2e9 * one, 1e9 * one, 0 * one, 24 * one, 1e15 * one, 8e12 * one, one, one)
    fast = told.range_s(small, "decode")
    assert fast.low_s[0] > small.floor_s()[0]
    from dataclasses import replace

    slow = told.range_s(replace(small, host_index=2 * one), "decode")
    assert slow.typical_s[0] == pytest.approx(2 * fast.typical_s[0])
