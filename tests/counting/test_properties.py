"""Properties that are true for any step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loaded import walked

from profiler.counting.attention import AttentionCore, causal_pairs
from profiler.facts.operators import Cause
from profiler.facts.step import ExecutionPath, Step
from profiler.theory import attention_steps, combined, fused_attention, matmul

NAMES = ("mistral-7b-v0.1", "mixtral-8x7b", "gemma-2-9b", "deepseek-v2-lite")
PATHS = (
    ExecutionPath(),
    ExecutionPath(attention="eager", all_logits=True),
    ExecutionPath(cache="static", static_cache_len=40_000),
)
work_of = cache(walked)


steps = st.builds(Step, st.integers(1, 64), st.integers(1, 512), st.integers(0, 8192))


@given(st.sampled_from(NAMES), steps, st.sampled_from(PATHS))
def test_model_work_is_at_most_executed_work(name: str, step: Step, path: ExecutionPath) -> None:
    work = work_of(name).work(step, path)
    assert work.model_flops <= work.executed_flops
    assert work.model_bytes <= work.executed_bytes


@given(st.sampled_from(NAMES), steps)
def test_flops_are_linear_in_batch_and_monotone_in_context(name: str, step: Step) -> None:
    model = work_of(name)
    one = model.work(Step(1, step.query, step.context))
    many = model.work(step)
    assert many.model_flops == step.batch * one.model_flops
    assert many.kv_read_bytes == step.batch * one.kv_read_bytes
    longer = model.work(Step(step.batch, step.query, step.context + 1))
    assert longer.model_flops >= many.model_flops
    assert longer.kv_read_bytes >= many.kv_read_bytes


@given(st.integers(1, 300), st.integers(0, 300), st.one_of(st.none(), st.integers(1, 400)))
def test_pairs_are_the_sum_over_queries(query: int, context: int, window: int | None) -> None:
    """Each query sees the cache, earlier queries and itself, or a window of them."""
    expected = sum(min(context + i, window or context + i) for i in range(1, query + 1))
    assert causal_pairs(query, context, window) == expected


def test_one_head_written_out_stays_below_any_ridge() -> None:
    """d = 128, N = 4096, fp16: QK^T is 4,294,967,296 FLOPs over 35,651,584 bytes; all three steps 62.7 FLOP/byte.

    (4d + 5) / (2 x 4) = 64.6 is the limit for d = 128 in 16 bits at any sequence length.
    """
    scores, softmax, output = attention_steps(4096, 4096, 128, "float16")
    assert (scores.flops, scores.bytes) == (4_294_967_296, 35_651_584)
    steps = (scores, softmax, output)
    assert sum(s.flops for s in steps) / sum(s.bytes for s in steps) == pytest.approx(62.7, abs=0.05)
    whole = combined("all", *attention_steps(65536, 65536, 128, "float16"))
    assert whole.intensity == pytest.approx((4 * 128 + 5) / 8, rel=0.01)
    assert whole.attainable_flops_per_s(989.4e12, 3.35e12) < 0.25 * 989.4e12


def test_latent_attention_is_expanded_again_at_every_step() -> None:
    """DeepSeek-V2-Lite caches 576 elements per token, and transformers runs kv_b_proj (512 -> 16 x 256) over all.

    Its 16 heads then multiply keys of 192 and values of 128, instead of latents of 576 and 512.
    """
    work = work_of("deepseek-v2-lite").work(Step(1, 1, 1000))
    assert (work.kv_read_bytes, work.kv_write_bytes) == (1000 * 576 * 27 * 2, 576 * 27 * 2)
    expanding, spared = 2 * 512 * 16 * 256 * 1000, 2 * 16 * (576 + 512 - 192 - 128) * 1001
    assert work.avoidable_flops["latent expanded again"] == 27 * (expanding - spared)


def test_the_bytes_of_a_latent_go_with_the_products_over_it() -> None:
    """2 x 16 x (576 + 512) FLOPs per position over its 1,152 bytes are 30 FLOP/byte in decode.

    With V3's 128 heads they are 242, above an H200's 206. A prompt is expanded once: 2 x 16 x (192 + 128) per pair.
    """
    [core] = [op for op in work_of("deepseek-v2-lite").operators if isinstance(op, AttentionCore)]
    decode = core.each(Step(4, 1, 8192), ExecutionPath())
    assert decode.model_flops == 4 * 8193 * 2 * 16 * (576 + 512)
    assert decode.model_flops / decode.kv_read_bytes == pytest.approx(30.2, abs=0.1)
    of_v3 = replace(core, query_heads=128, kv_heads=128).each(Step(4, 1, 8192), ExecutionPath())
    assert of_v3.model_flops / of_v3.kv_read_bytes == pytest.approx(242, abs=1)
    prefill = core.each(Step(2, 512, 0), ExecutionPath())
    assert prefill.model_flops == 2 * (512 * 513 // 2) * 2 * 16 * (192 + 128)
    # 128 tokens after 4096 are absorbed (24,576 more FLOPs per pair, or 4.19 million to expand a token), 512 expanded.
    few, many = (core.each(Step(1, query, 4096), ExecutionPath()) for query in (128, 512))
    assert few.model_flops == (128 * 4096 + 128 * 129 // 2) * 2 * 16 * 1088
    assert many.model_flops == (512 * 4096 + 512 * 513 // 2) * 2 * 16 * 320 + 4096 * 2 * 512 * 16 * 256
    for work, pairs in ((decode, 4 * 8193), (few, 128 * 4096 + 128 * 129 // 2)):
        unmasked = work.executed_flops - work.avoidable_flops[Cause.MASKED_SCORES]
        assert unmasked == pairs * 2 * 16 * 320, "executed work is that of transformers"


def test_a_linear_layer_of_4096() -> None:
    """I = BNK / (BK + BN + NK) is 1.0 at one token, 409.6 at 512 and 682.7 at 1024. It is never half of that."""
    assert matmul(1, 4096, 4096, "float16").intensity == pytest.approx(1.0, abs=1e-3)
    assert matmul(512, 4096, 4096, "float16").intensity == pytest.approx(409.6)
    assert matmul(1024, 4096, 4096, "float16").intensity == pytest.approx(682.67, abs=0.01)
    # The large product of an ungated Llama-2, 2048 x 4096 into 16384: 8Pd^2 / s(Pd + 4d^2 + 4Pd).
    assert matmul(2048, 16384, 4096, "float16").intensity == pytest.approx(1260, abs=1)


def test_attention_in_one_kernel() -> None:
    """With one query head per KV head, intensity is N/2 for the full square and N/4 if causal. With four it is 1.6x."""
    full = fused_attention(2048, 0, 32, 32, 128, "float16", causal=False)
    causal = fused_attention(2048, 0, 32, 32, 128, "float16")
    assert full.intensity == pytest.approx(1024)
    assert causal.intensity == pytest.approx(512, rel=1e-3)
    assert fused_attention(2048, 0, 32, 8, 128, "float16").intensity / causal.intensity == pytest.approx(1.6)
    # One query over a long cache: the intensity is the number of query heads per KV head.
    assert fused_attention(1, 100_000, 32, 32, 128, "float16").intensity == pytest.approx(1.0, rel=1e-3)
    assert fused_attention(1, 100_000, 32, 8, 128, "float16").intensity == pytest.approx(4.0, rel=1e-3)
