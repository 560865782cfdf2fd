"""Which keys a query sees, counted in the attention weights of real models, and Llama 4's chunks at their size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_models import SIZES
from transformers import AutoConfig

from profiler.counting.attention import AttentionCore
from profiler.counting.walk import walk
from profiler.facts.step import ExecutionPath, Step
from profiler.loading.meta_model import from_config

SMALL = {**SIZES, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT_NEO = {"num_layers": 2, "num_heads": 4, "window_size": 6, "attention_types": [[["global", "local"], 1]]}
LLAMA_4 = {"attention_chunk_size": 6, "layer_types": ["full_attention", "chunked_attention"], "num_local_experts": 2}
GEMMA = {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}


@pytest.mark.parametrize(
    ("model_type", "sizes", "kept"), [("gpt_neo", GPT_NEO, 21), ("llama4_text", LLAMA_4, 5), ("gemma3_text", GEMMA, 5)]
)
def test_pairs_and_kept_keys_are_those_of_the_library(model_type: str, sizes: dict[str, Any], kept: int) -> None:
    """A prompt of 20 tokens in a layer without a limit and in one with a limit of 6, then one token and another."""
    model = from_config(AutoConfig.for_model(model_type, **SMALL | sizes), torch.float32, "eager").eval()
    cores = walk(model).of_kind(AttentionCore)
    cache, context = None, 0
    for query in (20, 1, 2):
        with torch.no_grad():
            ids = torch.arange(3, 3 + query)[None]
            output = model(ids, past_key_values=cache, output_attentions=True, use_cache=True)
        step = Step(1, query, context)
        real = [int((weights[0] > 0).any(0).sum()) for weights in output.attentions]
        assert real == [int(core.pairs(step)) for core in cores]
        cache, context = output.past_key_values, context + query
        if query == 1:
            assert [layer.keys.shape[-2] for layer in cache.layers] == [21, kept]
            assert [int(core.live(context)) for core in cores] == [21, kept]


def test_the_chunks_of_llama_4() -> None:
    """Chunks of 8,192: two whole ones, then a decode step after 12,288 tokens, in the second one's middle."""
    core = AttentionCore("core", torch.bfloat16, query_heads=40, kv_heads=8, qk_dim=128, v_dim=128, window=8192)
    chunked = AttentionCore(**vars(core) | {"chunked": True})
    token_bytes, steps = 2 * 8 * 128 * 2, ((16384, 0), (131072, 0), (1, 12288), (1, 16384))
    expected = [2 * 8192 * 8193 // 2, 16 * 8192 * 8193 // 2, 4097, 1]
    assert [int(chunked.pairs(Step(1, *step))) for step in steps] == expected
    query, context = np.array(steps).T
    assert chunked.pairs(Step(1, query, context)).tolist() == expected
    decode, path = Step(2, 1, 12288), ExecutionPath()
    found, sliding = (each.each(decode, path) for each in (chunked, core))
    assert found.kv_read_bytes == 2 * 4096 * token_bytes
    assert found.executed_bytes == sliding.executed_bytes, "the kernel reads what the cache returns, seen or not"
    assert found.executed_flops == sliding.executed_flops
    assert chunked.kept_bytes(12288) == core.kept_bytes(12288) == 8191 * token_bytes
