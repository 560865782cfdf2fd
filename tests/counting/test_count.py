"""What count prints, a cross-check of models of full size, and one rank's share compared with arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest
import scoreboard
import sharded
import torch
from transformers import DeepseekV3Config, LlamaConfig

from profiler.count.grid import next_step
from profiler.counting.cache import counted_model
from profiler.counting.count import count
from profiler.counting.floor import bytes_per_weight
from profiler.counting.model_numbers import model_numbers
from profiler.counting.operators import Experts, Linear
from profiler.counting.tensor_parallel import walk_rank
from profiler.counting.walk import walk
from profiler.data.ceiling_set import ceilings_called
from profiler.errors import RequestError
from profiler.loading.meta_model import build_on_meta
from profiler.loading.source import resolve


def document(roofscope, *arguments: str) -> dict:  # type: ignore[no-untyped-def,type-arg]
    done = roofscope("count", *arguments, "--format", "json")
    assert done.code == 0, done.err
    parsed: dict = json.loads(done.out)  # type: ignore[type-arg]
    return parsed


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("gpt-oss-20b", marks=pytest.mark.ci), "gpt2", "gemma-2-9b", "phi-3-mini", "qwen3-30b-a3b"]
)
def test_second_opinion_at_full_size(roofscope, name: str) -> None:  # type: ignore[no-untyped-def]
    counted = document(roofscope, name, "--phase", "prefill", "--prompt", "64", "--batch", "2", "--crosscheck")
    assert counted["crosscheck"]["equal"], counted["crosscheck"]["differences"]


def test_the_default_attention_of_transformers_is_counted(roofscope) -> None:  # type: ignore[no-untyped-def]
    """gpt-oss has sinks, so eager attention: 24 layers of 64 heads with scores of 2 bytes, and again in float32."""
    arguments = ("gpt-oss-20b", "--phase", "prefill", "--prompt", "8192")
    counted = document(roofscope, *arguments)
    assert counted["path"]["attention"] == "eager"
    matrix = counted["executed_bytes"]["redundant"]["attention matrix"]
    assert matrix == 24 * 64 * 8192**2 * (4 * 2 + 2 * 4)
    assert document(roofscope, "smollm2-135m")["path"]["attention"] == "sdpa"
    refused = roofscope("count", *arguments, "--attn", "sdpa")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "use eager" in refused.err


@pytest.mark.parametrize(
    ("model", "used", "but_table"),
    [("mixtral-8x7b", 12.88e9, 12.75e9), ("gpt-oss-20b", 4.19e9, 3.61e9), ("qwen3-30b-a3b", 3.35e9, 3.04e9)],
)
def test_a_token_uses_a_part_of_a_mixture(model: str, used: float, but_table: float) -> None:
    """Published: 12.9 B of 46.7 (arXiv:2401.04088), 3.61 B of 20.9 (model card of gpt-oss), 3.3 B of 30.5 (Qwen3)."""
    numbers = model_numbers(counted_model(resolve(model)), 512)
    assert (numbers.used_params, numbers.used_params_but_table) == pytest.approx((used, but_table), rel=2e-3)


def test_a_context_beyond_the_models_own_limit_has_a_number_and_a_note() -> None:
    """Qwen3-8B in 4.85 bits on an RTX 5090: 4.97 GB and 147,456 bytes per token leave room for 128 k, not for 256 k."""
    at_limit, beyond, most = (
        count("qwen3-8b", context=context, gpu_names="RTX 5090", quant="4.85 bits")
        for context in (40_960, 131_072, 262_144)
    )
    assert "beyond" not in at_limit.note
    assert "131,072 tokens are beyond the model's own limit of 40,960" in beyond.note
    assert beyond.bytes["kv_read"] == 131_072 * 147_456
    assert [(row.in_chunks, bool(row.refusal)) for [row] in (at_limit.gpus, beyond.gpus, most.gpus)] == [
        (False, False), (True, False), (False, True)
    ]  # fmt: skip
    assert 1 < most.gpus[0].needs_bytes / (4.97e9 + 262_144 * 147_456) < 1.03, "little more than weights and cache"
    assert "needs 44.7 GB even in chunks" in most.gpus[0].refusal
    counted, ceilings = counted_model(resolve("qwen3-8b"), quant="4.85 bits"), ceilings_called("RTX 5090")
    assert counted.weight_bytes == round(8_190_735_360 * 4.85 / 8)
    [found] = model_numbers(counted, 512, (ceilings,)).gpus
    assert found.longest_prompt < 0.9 * 187_000 < found.longest_context < (ceilings.room_bytes - 4.97e9) / 147_456


def test_census_is_all_of_the_linear_work(roofscope) -> None:  # type: ignore[no-untyped-def]
    counted = document(roofscope, "llama-2-7b", "--phase", "prefill", "--prompt", "128", "--gemm-census")
    in_census = sum(2 * g["m"] * g["n"] * g["k"] * g["count"] for g in counted["gemms"])
    linears = sum(item["model_flops"] for item in counted["operators"] if item["group"] != "attention")
    assert in_census == linears
    # 7 linears per layer, of 3 shapes: 4096 x 4096, 4096 x 11008 and back; and the head on one row.
    shapes = {(g["m"], g["k"], g["n"]): g["count"] for g in counted["gemms"]}
    assert shapes == {
        (128, 4096, 4096): 4 * 32, (128, 4096, 11008): 2 * 32, (128, 11008, 4096): 32, (1, 4096, 32000): 1,
    }  # fmt: skip


def test_a_model_is_counted_in_its_published_format(roofscope) -> None:  # type: ignore[no-untyped-def]
    """gpt-oss-20b reads 4 of 32 experts per layer at 4.25 bits, and all else in bfloat16.

    With 2 bytes each, attention has 24 x (2880 x 9216 weights + 8000 biases + 64 sinks) and the head 2880 x 201088.
    Routers have 24 x (2880 + 1) x 32 and norms 49 x 2880. Experts take 24 x 4 x (3 x 2880 x 2880 x 4.25 / 8 + 8640
    biases of 2 bytes).
    """
    counted = document(roofscope, "gpt-oss-20b", "--batch", "1", "--prompt", "512", "--gpu", "RTX 4090")
    dense = 24 * (2880 * 9216 + 8000 + 64) + 2880 * 201_088 + 24 * 2881 * 32 + 49 * 2880
    experts = 24 * 4 * (3 * 2880 * 2880 * 17 // 32 + 8640 * 2)
    assert counted["published"] == "mxfp4"
    assert counted["bytes"]["weights"] == 2 * dense + experts
    # 13.76 GB are published. Eager attention over 512 tokens has 64 heads of scores, once in 16 bits and twice in 32.
    needs = 13.76e9 + 512 * 512 * 64 * 10
    assert counted["gpus"][0]["needs_bytes"] == pytest.approx(needs, rel=0.01)
    assert counted["gpus"][0]["floor_s"] == pytest.approx(3.72e9 / 1008e9, rel=2e-3)
    out = roofscope("count", "gpt-oss-20b").out
    assert "experts as published: MXFP4" in out
    assert "--dtype bfloat16 counts them in 16 bits" in out


def test_published_experts_keep_their_bits_in_a_mean_and_in_a_named_format() -> None:
    """ggml-org/gpt-oss-20b-GGUF: 12.1 GB are 4.63 bits, the experts as published, and most others in q8_0 (8.5 bits).

    An expert has 13,219,200 bytes and 8,640 biases of 2 bytes: 768 leave 8.596 bits to each of the 1.80 B others.
    """
    counted = count("gpt-oss-20b", quant="4.63 bits")
    stored = {item.name.rpartition(".")[2]: item.weight_bytes for item in counted.operators}
    assert stored["experts"] == 24 * 4 * (13_219_200 + 8640 * 2)
    assert stored["q_proj"] == pytest.approx(24 * (2880 * 4096 * 8.596 / 8 + 4096 * 2), rel=1e-4)
    assert counted.whole.weight_bytes == pytest.approx(12.1e9, rel=2e-3)
    assert counted.note == "weights in 4.63 bits, a mean of all: the experts keep their published 4.26"
    named = count("gpt-oss-20b", quant="q8_0")  # all others in 8.5 bits, biases and norms too
    assert named.whole.weight_bytes == pytest.approx(12.1e9, rel=0.02)
    assert named.note == "weights in 8.5 bits, but the experts keep their published 4.26"
    below = count("gpt-oss-20b", quant="4.2 bits")  # leaves 3.6 bits
    assert next(bytes_per_weight(bank) for bank in below.whole.work.of_kind(Experts)) == pytest.approx(4.2 / 8)


@pytest.mark.parametrize("option", [("--dtype", "bfloat16"), pytest.param(("--quant", "int8"), marks=pytest.mark.slow)])
def test_an_option_overrides_the_published_format(roofscope, option: tuple[str, str]) -> None:  # type: ignore[no-untyped-def]
    counted = document(roofscope, "gpt-oss-20b", *option)
    assert counted["published"] is None
    [experts] = [item for item in counted["operators"] if item["name"].endswith(".experts")]
    assert experts["weight_bytes"] == 24 * 4 * (3 * 2880 * 2880 + 8640) * 2
    assert "as published" not in roofscope("count", "gpt-oss-20b", *option).out


@pytest.mark.slow
def test_a_gguf_file_is_counted_as_transformers_loads_it(roofscope, gguf_file: Path) -> None:  # type: ignore[no-untyped-def]
    """All 134,515,008 parameters are read in 16 bits, because the embedding table is the tied head."""
    counted = document(roofscope, str(gguf_file))
    assert counted["gguf"] == {"types": ["Q4_1", "Q8_0"], "kept_by_kernels": False, "name": "GGUF (Q4_1, Q8_0)"}
    assert counted["bytes"]["weights"] == 2 * 134_515_008
    out = roofscope("count", str(gguf_file)).out
    assert "dequantised from GGUF (Q4_1, Q8_0) to bfloat16, as transformers loads it\n" in out


ROTARY_BYTES = 2 * 64 * 4
"""Buffers: the frequencies of a head of 128, scaled and original."""


@pytest.mark.slow
def test_every_style_of_a_plan_as_transformers_cuts_it() -> None:
    """Weights, KV cache and every message of a prefill have exactly equal bytes, in types that have every style."""
    types = ("gemma2", "gpt_neox", "olmo2", "qwen3_moe", "llama4_text", "glm4_moe_lite", "mimo_v2_flash")
    with sharded.group(2) as mesh:
        wrong = {name: score for name in types if (score := sharded.score(name, mesh)) != ("equal", "")}
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


@pytest.mark.parametrize(
    ("model", "ranks", "params", "norms"),
    [("llama-3.1-70b", 2, 70_553_706_496, 161 * 8192), ("mixtral-8x7b", 4, 46_702_792_704, 65 * 4096 + 32 * 8 * 4096)],
)
def test_a_rank_holds_its_part_of_the_stored_weights(model: str, ranks: int, params: int, norms: int) -> None:
    """In 4.85 bits, 42.8 GB of Llama-3.1-70B are 21.4 GB on each of two ranks; each has all norms and routers."""
    share = count(model, quant="4.85 bits", tp=ranks).tp
    assert share.weight_bytes == pytest.approx(((params - norms) / ranks + norms) * 4.85 / 8, rel=1e-6)


def test_a_rank_is_packed_once_it_is_cut(roofscope) -> None:  # type: ignore[no-untyped-def]
    """SmolLM2-1.7B has 24 layers of width 2048. In int8 each weight takes a byte, and each output a scale of 4.

    Columns are cut with their scales; o_proj and down_proj keep a scale for each of their 2048 outputs on every rank.
    """
    pytest.importorskip("bitsandbytes")
    counted = count("smollm2-1.7b", quant="int8", tp=2)
    sizes = {item.name.rpartition(".")[2]: item.weight_bytes for item in counted.operators}
    assert sizes["q_proj"] == 24 * (2048 + 4) * 1024
    assert sizes["o_proj"] == 24 * (1024 + 4) * 2048
    assert sizes["down_proj"] == 24 * (4096 + 4) * 2048
    [step] = next_step(counted, {"L4": True}, 512, 1, ranks=2).lines
    assert step.endswith("place FILE --model smollm2-1.7b --quant int8 --gpu 'L4' --tp 2"), "run refuses it"
    assert "cannot be split" in roofscope("run", "smollm2-1.7b", "--quant", "int8", "--tp", "2").err


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
        ({"model": "gpt-oss-20b", "tp": 2}, "quantised"),
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
