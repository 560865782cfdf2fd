"""The traffic and memory of torch's math kernel equal arithmetic and its recorded operators and allocations.

`_scaled_dot_product_attention_math` is one composite of plain operators, the same on a CPU and a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from machines import HOST
from small_models import small_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from traffic import Traffic

from profiler.counting.attention import AttentionCore
from profiler.counting.memory_need import memory_need
from profiler.counting.walk import walk
from profiler.engines.transformers import EagerEngine
from profiler.facts.operators import Cause
from profiler.facts.step import ExecutionPath, Heads, Step
from profiler.quant.storage import model_storage_bytes

pytestmark = pytest.mark.cpu

BATCH, HEADS, KV_HEADS, WIDTH = 2, 16, 4, 32


def math_path(core: AttentionCore, handed: Heads, static_slots: int = 0) -> ExecutionPath:
    """Return the path of the math kernel. A static cache masks a token, and any cache masks a prompt after it."""
    heads = {core.qk_dim: handed}
    path = ExecutionPath(kernel="math", masked_kernel="math", heads=heads, masked_heads=heads)
    return replace(path, cache="static", static_cache_len=static_slots) if static_slots else path


def attention(
    dtype: torch.dtype, query: int, keys: int, *, masked: bool, handed: Heads
) -> tuple[AttentionCore, Callable[[], torch.Tensor]]:
    """Return a core, and the kernel call that transformers makes for it."""
    core = AttentionCore("core", dtype, HEADS, KV_HEADS, WIDTH, WIDTH)
    heads, rows = (KV_HEADS, HEADS // KV_HEADS) if handed == "packed" else (HEADS, query)
    kv_heads = HEADS if handed == "repeated" else KV_HEADS
    q = torch.randn(BATCH, heads, rows, WIDTH, dtype=dtype)
    k, v = (torch.randn(BATCH, kv_heads, keys, WIDTH, dtype=dtype) for _ in range(2))
    mask = torch.ones(BATCH, 1, query, keys, dtype=torch.bool) if masked else None

    def call() -> torch.Tensor:
        causal = query > 1 and not masked
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=handed == "grouped")

    return core, call


SITUATIONS = pytest.mark.parametrize(
    ("query", "context", "masked", "handed"),
    [
        pytest.param(256, 0, False, "grouped", id="a prompt"),
        pytest.param(64, 192, True, "repeated", id="a prompt after a cache"),
        pytest.param(1, 1023, False, "grouped", id="a token"),
        pytest.param(1, 1023, True, "packed", id="a token on a static cache"),
        pytest.param(1, 1023, True, "repeated", id="the same up to transformers 5.17"),
    ],
)


def most_allocated(call: Callable[[], object]) -> int:
    """Return the peak memory of `call` above the memory before it, by torch's allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@SITUATIONS
def test_traffic_and_scratch_are_those_of_torch(
    dtype: torch.dtype, query: int, context: int, masked: bool, handed: Heads
) -> None:
    """Traffic is that of the recorded operators, and scratch memory is what the allocator gave."""
    keys, step = context + query, Step(BATCH, query, context)
    core, call = attention(dtype, query, keys, masked=masked, handed=handed)
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        with Traffic() as recorded:
            call()
        given = most_allocated(call)
    path = math_path(core, handed, static_slots=keys if masked and query == 1 else 0)
    work = core.each(step, path)
    cached = BATCH * keys * core.cached_elements * dtype.itemsize
    operands = work.activation_bytes + cached
    avoidable = work.avoidable_bytes[Cause.ATTENTION_MATRIX] + work.avoidable_bytes[Cause.REPEATED_HEADS]
    if handed == "repeated":  # `repeat_kv` read K and V once and wrote them before the call
        before = BATCH * keys * HEADS * 2 * WIDTH * dtype.itemsize
        avoidable -= 2 * before
        operands += before - cached
        given += before
    assert float(operands + avoidable) == pytest.approx(recorded.bytes, rel=0.03)
    assert float(core.scratch_bytes(step, path)) == pytest.approx(given, rel=0.03)


@pytest.mark.parametrize("kernel", ["math", "flash", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("prompt", [64, pytest.param(512, marks=pytest.mark.slow)])
def test_the_peak_of_a_prefill_is_what_the_allocator_gave(kernel: str, dtype: torch.dtype, prompt: int) -> None:
    """The model is TinyLlama with a quarter of the width and two layers. At 512 tokens, scores are most of its peak."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 16, "num_key_value_heads": 4}
    attention = "eager" if kernel == "eager" else "sdpa"
    model = small_model("Llama", **sizes, vocab_size=1000, attn_implementation=attention).to(dtype)
    work = walk(model)
    engine = EagerEngine(model, HOST)
    ids = torch.zeros(2, prompt, dtype=torch.long)
    forced = SDPBackend.MATH if kernel == "math" else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(forced), torch.no_grad():
        engine.prefill(ids, prompt)
        given = most_allocated(lambda: engine.prefill(ids, prompt))
    path = ExecutionPath(attention="eager") if kernel == "eager" else ExecutionPath(kernel=kernel, masked_kernel=kernel)
    need = memory_need(work, model_storage_bytes(model), Step(2, prompt, 0), 0, path)
    assert float(need.cache_bytes + need.workspace_bytes) == pytest.approx(given, rel=0.1)
