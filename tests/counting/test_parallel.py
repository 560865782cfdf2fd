"""One rank's share, counted from the plan, is equal to transformers' own sharding and to arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import scoreboard
import sharded
import torch
from transformers import DeepseekV3Config, LlamaConfig

from profiler.counting.count import count
from profiler.counting.operators import Experts, Linear
from profiler.counting.tensor_parallel import walk_rank
from profiler.counting.walk import walk
from profiler.errors import RequestError
from profiler.loading.meta_model import build_on_meta

# These types have every plan style of the causal LMs at least once.
TYPES = ("gemma2", "gpt_neox", "olmo2", "qwen3_moe", "llama4_text", "glm4_moe_lite", "mimo_v2_flash")

ROTARY_BYTES = 2 * 64 * 4
"""Buffers: the frequencies of a head of 128, scaled and original."""


@pytest.mark.slow
def test_every_style_of_a_plan_as_transformers_cuts_it() -> None:
    """Weights, KV cache and every message of a prefill have exactly equal bytes."""
    with sharded.group(2) as mesh:
        wrong = {name: score for name in TYPES if (score := sharded.score(name, mesh)) != ("equal", "")}
    assert wrong == {}


def test_all_types_were_compared_with_it() -> None:
    results = scoreboard.read_table(sharded.TABLE)
    assert set(scoreboard.types()) <= set(results), "a new type: run tests/counting/sharded.py"
    found = [result for result, _ in results.values()]
    assert "differs" not in found
    assert found.count("equal") >= 98


@pytest.mark.parametrize(("ranks", "rank"), [(3, 0), (3, 2), (4, 3)])
def test_uneven_lengths_are_cut_like_dtensors(ranks: int, rank: int) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 70, "num_attention_heads": 12, "vocab_size": 101}
    config = LlamaConfig(**sizes, num_hidden_layers=2)
    with sharded.group(ranks, rank) as mesh:
        theirs = sharded.sharded(config, mesh)
    mine = sharded.counted(config, ranks, rank)
    assert (mine.weight_bytes, mine.cache_bytes) == (theirs.weight_bytes, theirs.cache_bytes)


def test_llama_sends_two_sums_per_layer() -> None:
    """Megatron-LM (arXiv:1909.08053, section 3): two all-reduces per layer in a forward pass, each [tokens, hidden]."""
    counted = count("llama-3.1-8b", batch=4, prompt=512, tp=2)
    sums = {item.name: (item.count, item.bytes) for item in counted.tp.collectives}
    assert sums["model.layers.*.self_attn.o_proj.all_reduce"] == (32, 4 * 4096 * 2)
    assert sums["model.layers.*.mlp.down_proj.all_reduce"] == (32, 4 * 4096 * 2)
    norms = (2 * 32 + 1) * 4096
    assert counted.tp.weight_bytes == 2 * ((8_030_261_248 - norms) // 2 + norms) + ROTARY_BYTES
    assert counted.tp.cache_bytes == 4 * 513 * 32 * 2 * 4 * 128 * 2  # 4 of 8 KV heads
    whole = count("llama-3.1-8b", batch=4, prompt=512)
    assert 2 * counted.work.model_flops == whole.work.model_flops


def test_fewer_kv_heads_than_ranks_are_copied() -> None:
    share = count("llama-3.1-8b", prompt=512, tp=16).tp
    assert share.replicated_kv_heads == 8
    assert share.cache_bytes == 513 * 32 * 2 * 1 * 128 * 2  # one head of 8, on two ranks each
    kv_projections = 32 * 2 * 128 * 4096
    others = (8_030_261_248 - (2 * 32 + 1) * 4096 - 8 * kv_projections) // 16
    assert share.weight_bytes == 2 * (others + kv_projections + (2 * 32 + 1) * 4096) + ROTARY_BYTES


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "llama-3.1-8b", "tp": 3}, "32 query heads and 8 KV heads do not divide by 3; use --tp 2, 4, 8"),
        ({"model": "gpt2", "tp": 2}, "no tensor parallel plan for 'gpt2'"),
        ({"model": "llama-3.1-8b", "tp": 2, "quant": "nf4"}, "nf4 are packed"),
        ({"model": "gpt-oss-20b", "tp": 2}, "quantised"),
        ({"model": "llama-3.1-8b", "tp": 0}, "use 2 or more ranks"),
        ({"model": "llama-3.1-8b", "tp": 2, "second_opinion": True}, "counts the whole model"),
    ],
)
def test_models_that_cannot_be_split_are_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        count(**options)
    assert "\n" not in str(caught.value)


def test_fp8_blocks_are_cut_with_their_scales() -> None:
    """Two ranks of DeepSeek-V3's shapes in blocks of 128 x 128: half of each cut weight, and half of its scales."""
    sizes = {
        "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 256, "kv_lora_rank": 128,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 512, "pad_token_id": None,
    }  # fmt: skip
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = DeepseekV3Config(**sizes, quantization_config=quantised)
    whole, rank = (build_on_meta(config, torch.bfloat16) for _ in range(2))
    linears = {operator.name: operator.weight for operator in walk(whole).of_kind(Linear)}
    [experts] = walk(whole).of_kind(Experts)
    work = walk_rank(rank, 2)
    shares = {operator.name: operator.weight for operator in work.of_kind(Linear)}
    [share] = work.of_kind(Experts)
    for name in ("mlp.gate_proj", "mlp.down_proj", "mlp.shared_experts.up_proj"):
        mine, theirs = (weights[f"model.layers.*.{name}"] for weights in (shares, linears))
        assert mine.format == "float8"
        assert mine.weight_bytes == theirs.weight_bytes / 2
    assert share.expert_bytes == experts.expert_bytes / 2 == (3 * 512 * 512 + 3 * 4 * 4 * 4) / 2
