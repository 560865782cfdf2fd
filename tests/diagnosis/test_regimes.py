"""Verdicts on cases whose answer is known, from published measurements and from first principles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.diagnosis.regimes import Measurement, Verdict, judge
from profiler.diagnosis.step_time import Demand, Dispatch, Roofs, split


def verdict(
    latency_s: float,
    flops: float,
    weight_bytes: float,
    *,
    kv_bytes: float = 0.0,
    bytes_per_s: float,
    flops_per_s: float,
    dispatch_s: float | None = None,
    overlaps: bool = True,
    avoidable_bytes: float = 0.0,
    replayed_s: float | None = None,
    noise: str = "quiet",
    scale: float = 1.0,
) -> Verdict:
    """One operator with all the work; `scale` stretches time and roofs together."""
    operator = Demand("all", "mlp", flops, weight_bytes, kv_bytes, flops_per_s / scale, replayed_s)
    dispatch = None if dispatch_s is None else Dispatch(dispatch_s * scale, 0.0)
    roofs = Roofs(bytes_per_s / scale, dispatch, overlaps)
    return judge(
        Measurement(
            split=split(latency_s * scale, [operator], avoidable_bytes, roofs),
            model_flops=flops,
            model_bytes=weight_bytes + kv_bytes,
            compute_flops_per_s=flops_per_s / scale,
            roofs=roofs,
            latency_low_s=latency_s * scale * 0.995,
            latency_high_s=latency_s * scale * 1.005,
            noise=noise,
        )
    )


def test_llama_2_7b_on_an_a100_is_memory_bound() -> None:
    """gpt-fast README: 104.9 tok/s on an A100-80GB, 13.21 GB streamed, 1.7 TB/s and about 270 TFLOP/s measured."""
    found = verdict(1 / 104.9, 13.2e9, 13.21e9, bytes_per_s=1.7e12, flops_per_s=270e12, dispatch_s=2e-3)
    assert found.regime == "memory-bound"
    assert found.confidence == "high"


def test_qwen_on_an_l4_is_memory_bound_and_on_an_h100_it_is_not() -> None:
    """arXiv 2605.30571: Qwen2.5-7B bf16, batch 1: 81 % of the memory floor on an L4; 27 % on an H100, graphs 1.26x."""
    bytes_, flops = 15.2e9, 15.2e9
    on_l4 = verdict(62.3e-3, flops, bytes_, bytes_per_s=300e9, flops_per_s=110e12, dispatch_s=15e-3)
    assert on_l4.regime == "memory-bound"
    floor = bytes_ / 3.0e12
    on_h100 = verdict(floor / 0.27, flops, bytes_, bytes_per_s=3.0e12, flops_per_s=680e12, dispatch_s=15e-3)
    assert on_h100.regime in ("overhead-bound", "mixed")


def test_half_a_billion_on_a_t4_is_overhead_bound() -> None:
    """Qwen2.5-0.5B fp16 on a T4: 24.4 tok/s, 0.99 GB streamed, 8 % of 320 GB/s: the host sets the pace."""
    found = verdict(1 / 24.4, 0.99e9, 0.99e9, bytes_per_s=240e9, flops_per_s=40e12, dispatch_s=38e-3)
    assert found.regime == "overhead-bound"


@pytest.mark.parametrize("share", [0.70, 0.79, 0.90])
def test_most_of_the_bandwidth_is_memory_bound(share: float) -> None:
    """A peer calls 70 % and 79 % of a calibrated bandwidth overhead-bound."""
    found = verdict(1e-2 / share, 1e10, 1e10, bytes_per_s=1e12, flops_per_s=1e14, dispatch_s=1e-3)
    assert found.regime == "memory-bound"


def test_a_large_product_at_85_percent_is_compute_bound() -> None:
    found = verdict(1 / 0.85, 1e14, 1e10, bytes_per_s=1e12, flops_per_s=1e14, dispatch_s=1e-3)
    assert (found.regime, found.confidence) == ("compute-bound", "high")


def test_a_cpu_is_not_overhead_bound_by_default() -> None:
    """SmolLM2-135M fp32 on two cores: 538 MB at 30 GB/s is 18 of 29 ms, dispatch 6."""
    found = verdict(29e-3, 2.7e8, 538e6, bytes_per_s=30e9, flops_per_s=350e9, dispatch_s=6e-3, overlaps=False)
    assert found.regime == "memory-bound"


def test_a_tiny_model_on_a_cpu_is_overhead_bound() -> None:
    found = verdict(6e-3, 1e6, 2e6, bytes_per_s=30e9, flops_per_s=350e9, dispatch_s=5.5e-3, overlaps=False)
    assert found.regime == "overhead-bound"


def test_kv_dominated_decode_is_memory_bound_and_says_so() -> None:
    """vLLM, Llama-2-7B, H100-64GB, batch 256: 57.7 ms for 13.2 GB + 256 x 274 tokens x 0.524 MB at 1.63 TB/s."""
    kv = 256 * 274 * 524_288
    found = verdict(57.7e-3, 3.7e12, 13.2e9, kv_bytes=kv, bytes_per_s=1.2e12, flops_per_s=680e12, dispatch_s=5e-3)
    assert found.regime == "memory-bound"
    assert "kv-bound" in found.flags


def test_far_below_both_roofs_is_inconclusive() -> None:
    found = verdict(1.0, 1e12, 1e10, bytes_per_s=1e11, flops_per_s=1e13, dispatch_s=1e-3, replayed_s=0.8)
    assert found.regime == "inconclusive"
    assert "inefficient-kernels" in found.flags
    assert found.confidence == "low"


def test_copies_make_it_memory_bound_with_a_wasteful_path() -> None:
    found = verdict(1.0, 1e9, 4e10, bytes_per_s=1e11, flops_per_s=1e13, avoidable_bytes=4e10, dispatch_s=1e-3)
    assert found.regime == "memory-bound"
    assert "wasteful-path" in found.flags


def test_above_a_roof_is_flagged() -> None:
    found = verdict(0.9e-2, 1e9, 1e10, bytes_per_s=1e12, flops_per_s=1e14, dispatch_s=1e-3)
    assert "above-roof" in found.flags


def test_noise_ends_in_no_verdict() -> None:
    assert verdict(1e-2, 1e9, 1e10, bytes_per_s=1e12, flops_per_s=1e14, noise="unusable").regime == "inconclusive"


def test_missing_dispatch_is_never_high_confidence() -> None:
    found = verdict(1.05e-2, 1e9, 1e10, bytes_per_s=1e12, flops_per_s=1e14, dispatch_s=None)
    assert (found.regime, found.confidence) == ("memory-bound", "medium")


def test_evidence_names_its_figures() -> None:
    found = verdict(1.25e-2, 1e9, 1e10, bytes_per_s=1e12, flops_per_s=1e14, dispatch_s=1e-3)
    shares = {item.signal.split(" ")[0]: item.value for item in found.evidence}
    assert shares["intensity"] == pytest.approx(0.1 / 100)
    assert shares["share"] == pytest.approx(1e9 / 1e14 / 1.25e-2, abs=1e-2)
    assert shares["dispatch"] == pytest.approx(1e-3 / 1.25e-2)


@given(
    st.floats(1e-3, 1.0),
    st.floats(1e8, 1e14),
    st.floats(1e6, 1e11),
    st.floats(1e-4, 1e-2),
    st.floats(0.01, 100.0),
    st.booleans(),
)
def test_a_faster_machine_with_a_faster_clock_changes_nothing(
    latency_s: float, flops: float, bytes_: float, dispatch_s: float, scale: float, overlaps: bool
) -> None:
    def label(stretch: float) -> str:
        return verdict(
            latency_s,
            flops,
            bytes_,
            bytes_per_s=1e12,
            flops_per_s=1e14,
            dispatch_s=dispatch_s,
            overlaps=overlaps,
            scale=stretch,
        ).regime

    assert label(1.0) == label(scale)
