"""Verdicts on cases with a known label, from published measurements and from first principles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.facts.dispatch import Dispatch
from profiler.judge.breakdown import Demand, StepRoofs, break_down
from profiler.judge.regimes import Measurement, Verdict, judge_cell


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
    """Judge one operator with all the work; `scale` multiplies the time and divides the roofs."""
    operator = Demand("all", "mlp", flops, weight_bytes, kv_bytes, flops_per_s / scale, replayed_s)
    dispatch = None if dispatch_s is None else Dispatch(dispatch_s * scale, 0.0)
    roofs = StepRoofs(bytes_per_s / scale, dispatch, overlaps)
    return judge_cell(
        Measurement(
            split=break_down(latency_s * scale, [operator], avoidable_bytes / roofs.memory_bytes_per_s, roofs),
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
    """arXiv 2605.30571: Qwen2.5-7B bf16, batch 1: 81 % of the memory floor on an L4; 27 % on an H100, graphs 1.26x.

    On the H100 the bytes take 5.1 of 18.8 ms and hide as much of 15 ms of dispatch: 9.9 ms are left, 53 % of the step.
    """
    bytes_, flops = 15.2e9, 15.2e9
    on_l4 = verdict(62.3e-3, flops, bytes_, bytes_per_s=300e9, flops_per_s=110e12, dispatch_s=15e-3)
    assert on_l4.regime == "memory-bound"
    floor = bytes_ / 3.0e12
    on_h100 = verdict(floor / 0.27, flops, bytes_, bytes_per_s=3.0e12, flops_per_s=680e12, dispatch_s=15e-3)
    assert on_h100.regime == "overhead-bound"


def test_half_a_billion_on_a_t4_is_overhead_bound() -> None:
    """Qwen2.5-0.5B fp16 on a T4: 24.4 tok/s, 0.99 GB streamed, 8 % of 320 GB/s: the host is the limit."""
    found = verdict(1 / 24.4, 0.99e9, 0.99e9, bytes_per_s=240e9, flops_per_s=40e12, dispatch_s=38e-3)
    assert found.regime == "overhead-bound"


@pytest.mark.parametrize("share", [0.70, 0.79, 0.90])
def test_most_of_the_bandwidth_is_memory_bound(share: float) -> None:
    """Another tool calls 70 % and 79 % of a calibrated bandwidth overhead-bound."""
    found = verdict(1e-2 / share, 1e10, 1e10, bytes_per_s=1e12, flops_per_s=1e14, dispatch_s=1e-3)
    assert found.regime == "memory-bound"


def test_a_cpu_is_not_overhead_bound_by_default() -> None:
    """SmolLM2-135M fp32 on two cores: 538 MB at 30 GB/s takes 18 of 29 ms, and dispatch takes 6 ms."""
    found = verdict(29e-3, 2.7e8, 538e6, bytes_per_s=30e9, flops_per_s=350e9, dispatch_s=6e-3, overlaps=False)
    assert found.regime == "memory-bound"


def test_kv_dominated_decode_is_memory_bound_and_says_so() -> None:
    """vLLM, Llama-2-7B, H100-64GB, batch 256: 57.7 ms for 13.2 GB + 256 x 274 tokens x 0.524 MB at 1.63 TB/s."""
    kv = 256 * 274 * 524_288
    found = verdict(57.7e-3, 3.7e12, 13.2e9, kv_bytes=kv, bytes_per_s=1.2e12, flops_per_s=680e12, dispatch_s=5e-3)
    assert found.regime == "memory-bound"
    assert "kv-bound" in found.flags


def test_replayed_kernels_far_below_both_roofs_are_kernel_bound() -> None:
    replayed = verdict(1.0, 1e12, 1e10, bytes_per_s=1e11, flops_per_s=1e13, dispatch_s=1e-3, replayed_s=0.85)
    assert replayed.regime == "kernel-bound"
    assert "inefficient-kernels" in replayed.flags
    unknown = verdict(1.0, 1e12, 1e10, bytes_per_s=1e11, flops_per_s=1e13, dispatch_s=1e-3)
    assert (unknown.regime, unknown.confidence) == ("inconclusive", "low")


def test_copies_make_it_memory_bound_with_a_wasteful_path() -> None:
    found = verdict(1.0, 1e9, 4e10, bytes_per_s=1e11, flops_per_s=1e13, avoidable_bytes=4e10, dispatch_s=1e-3)
    assert found.regime == "memory-bound"
    assert "wasteful-path" in found.flags


def test_missing_dispatch_is_never_high_confidence() -> None:
    found = verdict(1.05e-2, 1e9, 1e10, bytes_per_s=1e12, flops_per_s=1e14, dispatch_s=None)
    assert (found.regime, found.confidence) == ("memory-bound", "medium")


def test_evidence_names_its_figures() -> None:
    found = verdict(1.25e-2, 1e9, 1e10, bytes_per_s=1e12, flops_per_s=1e14, dispatch_s=1e-3)
    shares = {item.signal.split(" ")[0]: item.value for item in found.evidence}
    assert shares["intensity"] == pytest.approx(0.1 / 100)
    assert shares["share"] == pytest.approx(1e9 / 1e14 / 1.25e-2, abs=1e-2)
    assert shares["dispatch"] == 0.0, "10 ms of bytes hide 1 ms of dispatch"


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


# Roofs of devices as published or measured (bytes/s, FLOP/s in the model's dtype), and whether they overlap.
DEVICES = {
    "2-core Xeon": (30e9, 350e9, False),
    "T4": (240e9, 40e12, True),
    "A100 SXM": (1.75e12, 260e12, True),
    "H100 SXM": (3.0e12, 680e12, True),
    "H200": (4.3e12, 770e12, True),
}


def on(
    device: str, latency_s: float, flops: float, weights: float, *, kv: float = 0.0, dispatch: float = 0.02
) -> Verdict:
    """Judge a step on a device; `dispatch` is a share of the step."""
    bytes_per_s, flops_per_s, overlaps = DEVICES[device]
    return verdict(
        latency_s,
        flops,
        weights,
        kv_bytes=kv,
        bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
        dispatch_s=dispatch * latency_s,
        overlaps=overlaps,
    )


@pytest.mark.parametrize("device", ["2-core Xeon", "T4", "H100 SXM"])
class TestEveryDevice:
    """The same cases on each device: the ratio of a step to the device's roofs decides, not their size."""

    def test_weights_at_85_percent_of_the_bandwidth(self, device: str) -> None:
        bytes_per_s = DEVICES[device][0]
        found = on(device, 10e-3, 1e6, 0.85 * 10e-3 * bytes_per_s)
        assert (found.regime, found.confidence) == ("memory-bound", "high")

    def test_a_product_at_75_percent_of_the_compute_roof(self, device: str) -> None:
        flops_per_s = DEVICES[device][1]
        found = on(device, 10e-3, 0.75 * 10e-3 * flops_per_s, 1e3)
        assert (found.regime, found.confidence) == ("compute-bound", "high")

    def test_a_host_that_takes_nearly_all_of_the_step(self, device: str) -> None:
        found = on(device, 10e-3, 1e6, 0.05 * 10e-3 * DEVICES[device][0], dispatch=0.92)
        assert found.regime == "overhead-bound"

    def test_a_cache_larger_than_the_weights(self, device: str) -> None:
        bytes_per_s = DEVICES[device][0]
        found = on(device, 10e-3, 1e6, 0.2 * 10e-3 * bytes_per_s, kv=0.6 * 10e-3 * bytes_per_s)
        assert found.regime == "memory-bound"
        assert "kv-bound" in found.flags

    def test_a_quarter_of_both_roofs(self, device: str) -> None:
        bytes_per_s, flops_per_s, _ = DEVICES[device]
        found = on(device, 10e-3, 0.2 * 10e-3 * flops_per_s, 0.25 * 10e-3 * bytes_per_s)
        assert (found.regime, found.confidence) == ("inconclusive", "low")

    def test_two_kinds_of_operators_that_share_the_step(self, device: str) -> None:
        """Half of the time goes to products at their roof and half to streams at theirs, so neither decides."""
        bytes_per_s, flops_per_s, overlaps = DEVICES[device]
        product = Demand("product", "mlp", 0.46 * 10e-3 * flops_per_s, 1e3, 0.0, flops_per_s)
        stream = Demand("stream", "attention", 1e3, 0.0, 0.46 * 10e-3 * bytes_per_s, flops_per_s)
        roofs = StepRoofs(bytes_per_s, Dispatch(1e-4, 0.0), overlaps)
        flops, bytes_ = product.flops + stream.flops, stream.kv_bytes + product.weight_bytes
        parts = break_down(10e-3, [product, stream], 0.0, roofs)
        found = judge_cell(Measurement(parts, flops, bytes_, flops_per_s, roofs, 9.9e-3, 10.1e-3))
        assert found.regime == "mixed"


def graph_case(graph_step_s: float | None, **fields: object) -> Verdict:
    """Judge an H100 step of 10 ms whose host takes 9 ms and whose bytes take 2 ms."""
    roofs = StepRoofs(3.0e12, Dispatch(9e-3, 0.0), overlaps=True)
    operator = Demand("all", "mlp", 1e9, 6e9, 0.0, 680e12)
    parts = break_down(10e-3, [operator], 0.0, roofs)
    return judge_cell(
        Measurement(parts, 1e9, 6e9, 680e12, roofs, 9.95e-3, 10.05e-3, graph_step_s=graph_step_s, **fields)  # type: ignore[arg-type]
    )


def test_a_graph_distinguishes_the_host_from_granularity() -> None:
    """A replay of 2.5 ms removes the host's time. One of 9 ms leaves the time of many small kernels."""
    assert "host" in graph_case(2.5e-3).flags
    assert "granularity" in graph_case(9e-3).flags
    assert not {"host", "granularity"} & set(graph_case(None).flags)


def test_an_idle_host_contradicts_overhead() -> None:
    found = graph_case(None, issue_s=2e-3)
    assert any(item.signal == "host issue time / step" for item in found.conflicts)
    assert graph_case(None, issue_s=9.5e-3).conflicts == graph_case(None).conflicts


def test_an_idle_device_votes_for_the_host_and_a_busy_one_for_nothing() -> None:
    """NVML counts an SM with one warp as active, so 95 % of the time is no evidence, but 20 % is."""
    [idle] = [item for item in graph_case(None, sm_active=0.2).evidence if "SM active" in item.signal]
    [busy] = [item for item in graph_case(None, sm_active=0.95).evidence if "SM active" in item.signal]
    assert (idle.vote, busy.vote) == ("overhead-bound", "")
    [memory] = [item for item in graph_case(None, memory_active=0.9).evidence if "memory active" in item.signal]
    assert (memory.vote, memory.weight) == ("", 0.0)


def test_time_that_grows_with_the_prompt_as_flops_do_is_a_signal() -> None:
    found = graph_case(None, depth_side="compute")
    assert [item.vote for item in found.evidence if item.signal == "doubling the prompt or context"] == [
        "compute-bound"
    ]
    assert any("prompt" in item.signal for item in found.conflicts)  # graph_case is bound by its host


def test_power_capping_is_flagged() -> None:
    assert "power-capped" in graph_case(None, power_capped=True).flags


RANK = {"low": 0, "medium": 1, "high": 2}


@given(st.floats(0.62, 1.0), st.sampled_from(["", "memory"]), st.booleans())
def test_more_evidence_never_lowers_confidence_unless_it_disagrees(share: float, side: str, graph: bool) -> None:
    """A flat doubling and a graph that saves nothing agree with a memory-bound step."""
    roofs = StepRoofs(1e12, Dispatch(1e-4, 0.0), overlaps=True)
    operator = Demand("all", "mlp", 1e9, share * 1e10, 0.0, 1e14)
    bare = Measurement(break_down(1e-2, [operator], 0.0, roofs), 1e9, share * 1e10, 1e14, roofs, 0.995e-2, 1.005e-2)
    more = replace(bare, batch_side=side, graph_step_s=0.99e-2 if graph else None)
    assert RANK[judge_cell(more).confidence] >= RANK[judge_cell(bare).confidence]
    against = replace(bare, graph_step_s=0.2e-2, batch_side="compute")
    assert RANK[judge_cell(against).confidence] <= RANK[judge_cell(bare).confidence]


@pytest.mark.parametrize(
    ("total", "active", "expected"),
    [
        (46.7e9, 12.9e9, "memory-bound"),  # Mixtral-8x7B in 16 bits, batch 1: two of eight experts are read
        (30.5e9, 3.3e9, "memory-bound"),  # Qwen3-30B-A3B, batch 1
    ],
)
def test_only_active_experts_count(total: float, active: float, expected: str) -> None:
    """Time depends on the experts that a token reads. Counting all of them would put the step above the roof."""
    bytes_ = 2 * active
    found = on("H200", bytes_ / 4.3e12 / 0.8, bytes_, bytes_)
    assert found.regime == expected
    assert "above-roof" not in found.flags
    assert "above-roof" in on("H200", bytes_ / 4.3e12 / 0.8, bytes_, 2 * total).flags


@pytest.mark.parametrize("slowdown", [3.0, 5.0])
def test_a_slower_host_moves_a_memory_bound_cpu_step_to_overhead(slowdown: float) -> None:
    """20 ms of bytes and 6 ms of dispatch add up to 26 ms, and to 38 ms if the host is three times slower."""
    bytes_ = 20e-3 * 30e9
    before = on("2-core Xeon", 26e-3, 1e6, bytes_, dispatch=6 / 26)
    after_s = 20e-3 + slowdown * 6e-3
    after = on("2-core Xeon", after_s, 1e6, bytes_, dispatch=slowdown * 6e-3 / after_s)
    assert before.regime == "memory-bound"
    assert after.regime == ("overhead-bound" if slowdown * 6e-3 / after_s >= 0.5 else "memory-bound")


@pytest.mark.parametrize("bits", [4.5, 8.0])
def test_quantised_weights_whose_kernel_is_slow_are_not_called_memory_bound(bits: float) -> None:
    """A 7B model in 4 or 8 bits takes the 8 ms of 16 bits. Its bytes need 2.3 or 4 ms, its FLOPs 0.05, its host 0.16.

    No share reaches its threshold, the two largest have less than 60 %, and no kernel was replayed to explain the rest.
    """
    bytes_ = 7e9 * bits / 8
    found = on("A100 SXM", 7e9 * 2 / 1.75e12, 14e9, bytes_)
    assert (found.regime, found.confidence) == ("inconclusive", "low")


@given(st.sampled_from(["memory-bound", "compute-bound"]), st.floats(0.65, 0.95), st.floats(0.01, 0.7), st.booleans())
def test_a_step_of_which_one_roof_explains_most_is_not_mixed(
    regime: str, share: float, other: float, overlaps: bool
) -> None:
    """One roof needs 65 to 95 % of the step, the other at most 0.7 times as much, and the host 1 %."""
    by_memory, by_compute = (share, other * share) if regime == "memory-bound" else (other * share, share)
    found = verdict(
        1e-2, by_compute * 1e12, by_memory * 1e10, bytes_per_s=1e12, flops_per_s=1e14, dispatch_s=1e-4,
        overlaps=overlaps,
    )  # fmt: skip
    assert found.regime == regime
