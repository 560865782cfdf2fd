"""Published figures, the ranges fitted without their source, and the spread over simulated sources."""

import math
import statistics
from collections import defaultdict
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest

from profiler.data.published_results import coverages, formats_of
from profiler.predict.published_efficiency import CardSteps, Shares, attained, no_basis
from tests.published_fit import (
    LeftOut,
    SourceSpread,
    coverages_again,
    fit_efficiency,
    fitted,
    left_out,
    published,
    steps_of,
)  # fmt: skip


def decodes(*of: str) -> list[LeftOut]:
    return [one for one in left_out() if (one.point.kind, one.point.form, one.point.phase) == (*of, "decode")]


@pytest.mark.slow
def test_ranges_cover_nine_in_ten_figures_of_sources_that_they_have_not_seen() -> None:
    """Each figure counts once; every engine kind and form that commands use has nine in ten, up to one figure.

    Those of nf4 have eight in ten: its authors need a third of others' time per layer.
    """
    assert len({one.point for one in left_out()}) == len(left_out()) > 400
    by_source: dict[str, list[bool]] = defaultdict(list)
    for one in left_out():
        by_source[one.point.publisher].append(one.inside)
    assert len(by_source) >= 20
    assert statistics.mean(map(statistics.mean, by_source.values())) >= 0.9, "sources count alike"
    assert statistics.mean(one.inside for one in left_out()) >= 0.9
    for kind, form in (
        ("compiled", "dense"), ("compiled", "int4wo"), ("compiled", "int8wo"), ("compiled", "fp8"),
        ("compiled", "mixture"), ("eager", "dense"), ("eager", "int8"),
    ):  # fmt: skip
        chosen = decodes(kind, form)
        assert sum(one.inside for one in chosen) + 1 >= 0.9 * len(chosen), (kind, form)
    assert statistics.mean(one.inside for one in decodes("eager", "nf4")) > 0.8


def test_mixtures_of_experts_have_a_range_of_their_own() -> None:
    """The range of compiled engines is twice as wide as that of their 16 bits.

    By hand, bytes that 8 tokens of Qwen3-30B-A3B stream in 16 bits: 1.23 B weights of all tokens, and of 28.99 B of
    routed ones those that any of 8 tokens chose: 1 - (1 - 8 / 128)**8 = 40.3 %.
    """
    rows = {row.form: row for row in coverages() if (row.kind, row.phase) == ("compiled", "decode")}
    compiled, dense = rows["mixture"], rows["dense"]
    assert compiled.inside >= 0.9 * compiled.checked
    assert compiled.width > 2 * dense.width
    of_eight = next(
        point for point in published() if (point.model, point.batch, point.bits) == ("Qwen3-30B-A3B", 8, 16)
    )
    assert of_eight.weight_bytes == pytest.approx(2 * (1.23e9 + 0.403 * 28.99e9), rel=1e-2)
    assert of_eight.flops == pytest.approx(8 * 2 * (1.23e9 + 28.99e9 / 16), rel=1e-2)


def test_routed_experts_are_no_bound_on_the_step_of_several_tokens() -> None:
    """All 16 tokens may choose the same experts: llama.cpp's random tokens take less than their even choice would."""
    random = next(
        point for point in published() if (point.model, point.gpu, point.batch) == ("gpt-oss-120b", "GB10", 16)
    )
    work = steps_of([random])
    assert work.bound_s()[0] < random.latency_s < work.floor_s()[0]
    span = attained("llama.cpp", "mixture").range_s(work, "decode")
    assert span.low_s[0] < work.floor_s()[0] <= span.typical_s[0]


@pytest.mark.slow
def test_the_table_of_coverages_is_computed_from_the_figures() -> None:
    """If it differs, `python -m tests.published_fit` writes it again."""
    assert coverages() == coverages_again()
    assert sum(row.figures for row in coverages()) == len(published())


@pytest.mark.slow
def test_the_table_of_efficiencies_is_the_fit_to_the_published_figures() -> None:
    """If it differs, `python -m tests.published_fit` writes it again."""
    for row in fitted():
        kept, found = (
            {name: value for name, value in vars(each).items() if name not in ("kind", "family")}
            for each in (attained(row.kind, row.family), row)
        )
        assert kept == pytest.approx(found, rel=1e-6)


def test_a_planted_engine_is_found_again() -> None:
    """The shares are recovered from noiseless figures computed from them on the published GPUs."""
    truth = Shares(memory=0.62, compute=0.45, layer_cycles=9e4)
    points = [point for point in published() if point.kind == "compiled"]
    seconds = truth.step_s(steps_of(points))
    planted = [replace(point, latency_s=float(value)) for point, value in zip(points, seconds, strict=True)]
    shares = fit_efficiency(planted, Shares(0.75, 0.60, layer_cycles=1e5))
    assert astuple(shares) == pytest.approx(astuple(truth), rel=0.05)


def test_no_figure_beats_its_datasheet() -> None:
    """A step below the lower bound of its GPU would be a wrong row, a wrong format or a wrong peak.

    Of mixtures, it excludes the routed experts of several tokens, since all may choose the same.
    """
    for point in published():
        assert point.latency_s > 0.98 * steps_of([point]).bound_s()[0], point


def one_step(*figures: float) -> CardSteps:
    return CardSteps(*(np.array([figure]) for figure in figures))


def test_a_range_is_above_the_floor_and_includes_the_host() -> None:
    eager = attained("eager", "dense")
    small = one_step(2e9, 1e9, 0.0, 0.0, 24, 1e15, 8e12, 1.8e9, 1, 1)
    fast = eager.range_s(small, "decode")
    assert fast.low_s[0] > small.floor_s()[0]
    slow = eager.range_s(replace(small, host_index=2 * small.host_index), "decode")
    assert slow.typical_s[0] == pytest.approx(2 * fast.typical_s[0])


def test_a_captured_step_takes_its_bytes_and_cycles_of_each_layer_whatever_the_host() -> None:
    """By hand: 8.04 GB at 0.9 of 1008 GB/s take 8.9 ms, and 36 layers of 150,000 cycles at 2.52 GHz take 2.1 ms.

    pegainfer publishes 10.31 ms for such a step (Qwen3-4B on an RTX 4090, github:pegainfer-project/pegainfer pull 69).
    """
    step = one_step(8.04e9, 8.04e9, 0.0, 0.0, 36, 165e12, 1008e9, 2.52e9, 3, 1)
    by_hand = Shares(0.9, 0.6, layer_cycles=1.5e5).step_s(step)[0]
    assert by_hand == pytest.approx(8.04e9 / (0.9 * 1008e9) + 36 * 1.5e5 / 2.52e9)
    assert by_hand == pytest.approx(10.31e-3, rel=0.1)
    compiled = attained("compiled", "dense").range_s(step, "decode")
    assert compiled.low_s[0] < 10.31e-3 < compiled.high_s[0]


def test_figures_of_one_owner_are_of_one_publisher() -> None:
    point = published()[0]
    named = {
        "github:turboderp/exllama:README.md@3b013cd53c7d": "turboderp",
        "https://johnmusgrave.com/p/vllm-throughput-latency-sweep-on": "johnmusgrave.com",
        "arXiv:2605.30571 abstract": "arXiv:2605.30571 abstract",
    }
    for source, publisher in named.items():
        assert replace(point, source=source).publisher == publisher


def test_figures_of_another_engine_are_no_basis() -> None:
    """No source publishes fp8 or 4-bit torchao kernels in plain transformers; bitsandbytes has no compiled engine."""
    assert not {"fp8", "int4wo"} & {*formats_of("eager")}
    assert "nf4" not in formats_of("compiled")
    assert {"fp8", "dense"} <= {*formats_of("compiled")}
    assert no_basis("fp8", "eager").endswith("use --engine compiled or --quant none, int8, nf4, fp4.")


def test_the_spread_over_sources_by_hand() -> None:
    """Two sources at 0.1 and 0.3 on a prior of one at 0 with variance 0.04.

    Mean (0 + 0.1 + 0.3) / 3; variance (0.04 + 2 * 0.1**2 + 1 * 2 / 3 * 0.2**2) / 3; t(3) = 2.353 for nine in ten.
    """
    spread = SourceSpread(0.0, 0.04, 1.0).narrowed([("a", 0.1), ("b", 0.3)])
    assert spread.mean == pytest.approx(0.4 / 3)
    assert spread.variance == pytest.approx((0.04 + 0.02 + 0.08 / 3) / 3)
    assert spread.sources == 3
    low, high = spread.interval(0.9)
    assert high - low == pytest.approx(2 * 2.353 * math.sqrt(spread.variance * 4 / 3), rel=0.01)


@pytest.mark.slow
def test_the_counts_in_the_documentation_are_those_of_the_check() -> None:
    inside, checked = sum(one.inside for one in left_out()), len(left_out())
    root = Path(__file__).parents[2]
    limits = (root / "docs/explanation/limits-and-accuracy.md").read_text(encoding="utf-8")
    gpus, publishers = len({point.gpu for point in published()}), len({point.publisher for point in published()})
    for text in (
        f"{inside} of {checked} published figures ({inside / checked:.0%}) are inside".replace("%", " %"),
        f"{len(published())} published figures of {gpus} GPUs from {publishers} sources",
    ):
        assert text in " ".join(limits.split())
    assert f"{inside} of {checked} published figures in range" in (root / "README.md").read_text(encoding="utf-8")
