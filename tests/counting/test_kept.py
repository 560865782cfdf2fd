"""What a sequence keeps, by arithmetic from published configs: states, windows, shared and chosen keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loaded import walked
from small_models import SIZES
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.counting.attention import AttentionCore, Compressor, Indexer, causal_pairs, compressed_pairs
from profiler.counting.count import count, counted_module
from profiler.counting.memory_need import cache_bytes, memory_need, state_bytes
from profiler.counting.model_numbers import ModelNumbers, model_numbers
from profiler.counting.operators import Elementwise, Experts, Linear, ModelWork, RecurrentState
from profiler.counting.preset_counts import CountedModel
from profiler.data.roof_set import roofs_called
from profiler.facts.step import ExecutionPath, Step, bytes_by_kind
from profiler.loading.config import config_from
from profiler.loading.meta_model import build_on_meta

# Shapes of published models; the vocabulary and the number of layers do not matter here.
QWEN_27B = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
}  # fmt: skip
GEMMA_31B = {
    "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376, "intermediate_size": 21504,
    "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
    "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262144,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
}  # fmt: skip
LLAMA = {**SIZES, "model_type": "llama"}


def counted(raw: dict[str, Any]) -> CountedModel:
    config = config_from(raw, "model")
    return counted_module(build_on_meta(config, torch.bfloat16), config, torch.bfloat16, "none")


def numbers(raw: dict[str, Any], context: int, *gpus: str) -> ModelNumbers:
    return model_numbers(counted(raw), context, tuple(map(roofs_called, gpus)))


def test_the_matrix_memory_of_xlstm_7b() -> None:
    """32 layers of 8 heads: a matrix of 256 x 512, a normaliser of 256 and a maximum, in bfloat16."""
    assert state_bytes(walked({"model_type": "xlstm"})) == 32 * 8 * (256 * 512 + 256 + 1) * 2 == 67_240_448


def test_a_state_in_every_memory_figure_and_in_the_traffic() -> None:
    """48 layers x 48 heads x 128 x 128 in float32, and 4 inputs of (2 x 16 + 48) x 128 channels in bfloat16."""
    state = 48 * (48 * 128 * 128 * 4 + 80 * 128 * 4 * 2)
    model = counted(QWEN_27B)
    assert state_bytes(model.work) == state
    assert cache_bytes(model.work, 64, 512) == 64 * (512 * 65_536 + state)
    found = model_numbers(model, 512, (roofs_called("A100 80GB SXM"),))
    assert (found.kv_bytes_per_token, found.state_bytes_per_sequence) == (65_536, state)
    assert (found.architecture.layers, found.architecture.attention_layers) == (64, 16)
    assert found.gpus[0].largest_batch < found.gpus[0].largest_batch_one_by_one < (83e9 - model.weight_bytes) / state
    step = model.work.work(Step(64, 1, 512))
    assert bytes_by_kind(step)["state"] == 2 * 64 * state
    assert bytes_by_kind(model.work.work(Step(64, 512, 0)))["state"] == 64 * state


@pytest.mark.slow
def test_two_slopes_of_a_model_with_windows() -> None:
    """50 layers of 16 heads x 256 with a window of 1,024, and 10 of 4 heads x 512 without."""
    found = numbers(GEMMA_31B, 8192, "H200 SXM")
    assert (found.kv_bytes_per_token, found.windows_full_at, found.kv_bytes_per_later_token) == (901_120, 1024, 81_920)
    assert found.kv_bytes_per_sequence == 50 * 1023 * 16_384 + 10 * 8192 * 8192
    assert found.kv_equals_weights_at == pytest.approx(739_000, rel=0.001)
    [gpu] = found.gpus
    assert gpu.largest_batch < gpu.largest_batch_one_by_one
    need = memory_need(counted(GEMMA_31B).work, 61_400_000_000, Step(1, gpu.longest_context, 0), 1, ExecutionPath())
    assert float(need.safe_bytes) == pytest.approx(roofs_called("H200 SXM").room_bytes, rel=0.02)


def test_layers_that_share_keys_keep_none_and_run_the_last_position() -> None:
    shared = {
        **GEMMA_31B, "num_hidden_layers": 12, "layer_types": GEMMA_31B["layer_types"][:12], "num_kv_shared_layers": 6,
        "attention_k_eq_v": False,
    }  # fmt: skip
    whole = {**shared, "num_kv_shared_layers": 0}
    assert cache_bytes(walked(shared), 1, 2048) * 2 == cache_bytes(walked(whole), 1, 2048)
    prefill, decode = (mlp_flops(walked(shared), Step(1, query, 0)) for query in (100, 1))
    assert prefill == decode * (6 * 100 + 6) / 12


def mlp_flops(work: ModelWork, step: Step) -> float:
    linears = [operator for operator in work.of_kind(Linear) if operator.group == "mlp"]
    return float(sum(operator.work(step, ExecutionPath()).model_flops for operator in linears))


def test_an_indexer_chooses_keys() -> None:
    """A decode step after 10,000 tokens reads 2,048 latents of 576, and 10,000 indexer keys of 128."""
    dsa = {
        "model_type": "deepseek_v32", "vocab_size": 128, "hidden_size": 256, "num_hidden_layers": 1,
        "mlp_layer_types": ["dense"], "intermediate_size": 128,
    }  # fmt: skip
    work = walked(dsa)
    [core], [indexer] = work.of_kind(AttentionCore), work.of_kind(Indexer)
    found = core.work(Step(1, 1, 10_000), ExecutionPath())
    assert found.kv_read_bytes == 2048 * 576 * 2
    assert found.model_flops == 2048 * 2 * 128 * (512 + 64 + 512)
    scores = indexer.work(Step(1, 1, 10_000), ExecutionPath())
    assert scores.kv_read_bytes == 10_000 * 128 * 2
    assert scores.model_flops == 10_001 * 64 * 2 * (128 + 1)
    assert cache_bytes(work, 1, 10_000) == 10_000 * (576 + 128) * 2
    assert work.dense_instead == ()


@pytest.mark.parametrize(("query", "context"), [(1, 0), (1, 37), (20, 0), (7, 13)])
@pytest.mark.parametrize("top_k", [None, 3])
def test_pairs_of_blocks(query: int, context: int, top_k: int | None) -> None:
    limit = top_k or 10**6
    expected = sum(min((context + place) // 4, limit) for place in range(1, query + 1))
    assert compressed_pairs(query, context, 4, top_k) == expected
    assert compressed_pairs(query, context, 1, top_k) == causal_pairs(query, context, top_k)


def test_a_compressor_keeps_blocks_and_what_is_not_complete() -> None:
    """9 tokens at 4 a key: 2 keys of 16, and the values and gates of 1 token; with overlap those of a block too."""
    plain = Compressor("c", torch.bfloat16, 16, 4, 1)
    assert plain.kept_bytes(9) == (2 + 2 * 1) * 16 * 2
    overlapping = Compressor("c", torch.bfloat16, 16, 4, 2)
    assert overlapping.kept_bytes(np.array([3, 9])).tolist() == [2 * 2 * 3 * 16 * 2, (2 + 2 * 2 * 1 + 2 * 4) * 16 * 2]


class _Arithmetic(TorchDispatchMode):
    """Counts element-wise arithmetic and products."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if name in ("mul", "add", "sub"):
            self.flops += result.numel()
        elif name in ("mv", "mm"):
            self.flops += 2 * result.numel() * args[0].shape[-1]
        return result


def _decaying(state: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[torch.Tensor]:
    """h = a h + v k^T, y = h k (Mamba-2, arXiv:2405.21060, equation 1; Lightning attention has the same)."""
    state = 0.9 * state + value[:, None] * key[None, :]
    yield state @ key


def _delta(state: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[torch.Tensor]:
    """S = a S + (v - a S k) k^T, o = S q (Gated DeltaNet, arXiv:2412.06464, equation 10)."""
    state = 0.9 * state
    state = state + (value - state @ key)[:, None] * key[None, :]
    yield state @ key


@pytest.mark.parametrize(
    ("model_type", "recurrence", "sizes"),
    [
        ("mamba2", _decaying, {"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2}),
        ("qwen3_5_text", _delta, {}),
    ],
)
def test_the_flops_of_a_recurrence(
    model_type: str, recurrence: Callable[..., Iterator[torch.Tensor]], sizes: dict[str, int]
) -> None:
    """Those of the published recurrence of one token, without the terms that do not grow with the state."""
    base = {"model_type": model_type, "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, **sizes}
    if model_type == "qwen3_5_text":
        base |= {"layer_types": ["linear_attention"], "num_attention_heads": 4, "num_key_value_heads": 2}
    [state] = walked(base).of_kind(RecurrentState)
    width = 256
    with _Arithmetic() as arithmetic:
        next(recurrence(torch.zeros(width, width), torch.zeros(width), torch.zeros(width)))
    counted_flops = state.work(Step(1, 1, 5), ExecutionPath()).model_flops / state.state_elements
    assert counted_flops == pytest.approx(arithmetic.flops / width**2, abs=0.01)


def test_the_routers_own_number_of_experts() -> None:
    mixture = {
        **GEMMA_31B, "num_hidden_layers": 6, "layer_types": GEMMA_31B["layer_types"][:6], "enable_moe_block": True,
        "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    }  # fmt: skip
    [experts] = walked(mixture).of_kind(Experts)
    assert (experts.per_token, experts.num_experts) == (8, 128)
    listed = {
        **LLAMA, "model_type": "hunyuan_v1_moe", "head_dim": 16, "num_experts": 4, "moe_topk": [3, 2],
        "num_shared_expert": [1, 1],
    }  # fmt: skip
    assert [operator.per_token for operator in walked(listed).of_kind(Experts)] == [3, 2]


def test_a_gated_linear_recurrence_keeps_a_value_per_channel() -> None:
    """RecurrentGemma has 2 layers of RG-LRU before attention: gates of 4 blocks of 16 x 16, a float32 a channel."""
    sizes = {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 6}
    work = walked({**SIZES, "model_type": "recurrent_gemma", **sizes})
    [state] = work.of_kind(RecurrentState)
    gates = [operator for operator in work.of_kind(Linear) if "gate_weight" in operator.name]
    assert (state.count, state.kept_bytes(9), state.flops_per_element) == (2, 64 * 4, 5)
    assert sum(gate.work(Step(1, 1, 0), ExecutionPath()).model_flops for gate in gates) == 2 * 2 * 2 * 4 * 16 * 16
    assert work.coverage == 1


def test_a_norm_per_head_is_understood() -> None:
    """Command R+ has norms of 96 x 128 and 8 x 128 in each layer; here they are of 4 x 16 and 2 x 16."""
    work = walked({**SIZES, "model_type": "cohere", "use_qk_norm": True})
    norms = [operator for operator in work.of_kind(Elementwise) if operator.group == "norm"]
    assert sum(norm.count * norm.weight_bytes for norm in norms) == 2 * (2 * (64 + 4 * 16 + 2 * 16) + 64)
    assert work.coverage == 1


def test_a_window_beyond_what_the_model_supports_never_fills() -> None:
    """Phi-4-mini's window is 262,144 tokens, and it supports 131,072."""
    window = {"sliding_window": 262_144, "max_position_embeddings": 131_072}
    found = numbers({**SIZES, "model_type": "mistral", **window}, 64)
    assert (found.windows_full_at, found.kv_bytes_per_later_token) == (0, found.kv_bytes_per_token)


def test_a_model_of_pictures_is_counted_as_its_decoder(tmp_path: Any) -> None:
    """A tower of 12 layers, 64 wide, reads a picture of 16 x 16 patches; a step of text does not."""
    tower = {
        "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 12,
        "num_attention_heads": 4, "image_size": 224, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    config = config_from({"model_type": "llava", "text_config": LLAMA, "vision_config": tower}, "model")
    config.save_pretrained(tmp_path)
    found = count(str(tmp_path))
    work, alone = found.whole.work, walked(LLAMA)
    assert work.work(Step(1, 1, 9)).model_flops == alone.work(Step(1, 1, 9)).model_flops
    assert work.params - work.tower_params == alone.params
    patches = 256
    layers = 12 * (2 * patches * (4 * 64 * 64 + 2 * 64 * 256) + 4 * patches**2 * 64)
    embedding, projector = 2 * patches * 3 * 14 * 14 * 64, 2 * patches * (64 * 64 + 64 * 64)
    assert work.picture_pixels == 224
    assert work.tower_flops == pytest.approx(layers + embedding + projector, rel=0.02)
