"""The memory that routed experts take: real tensors on a CPU, and Mixtral's at its published size."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from shrink import configs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from profiler.counting.cache import counted_model
from profiler.counting.memory_need import memory_need, need_of_batch, path_on
from profiler.counting.operators import Experts
from profiler.counting.walk import called_modules, walk
from profiler.facts.operators import Cause
from profiler.facts.step import ExecutionPath, Step
from profiler.loading.meta_model import build_on_meta, from_config
from profiler.loading.source import resolve

SMALL = {
    "vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 128, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "layer_types": ["full_attention"] * 2, "pad_token_id": 0,
}  # fmt: skip


class _Peak(TorchDispatchMode):
    """Follows the bytes of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        result = func(*args, **(kwargs or {}))
        for storage in (each.untyped_storage() for each in tree_leaves(result) if torch.is_tensor(each)):
            if storage._cdata not in old and storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))
        return result


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {}),
        ("glm4_moe", {}),
        pytest.param("gpt_oss", {}, marks=pytest.mark.slow),
        pytest.param("nemotron_h", {"layer_types": ["moe"] * 2, "mlp_hidden_act": "relu2"}, marks=pytest.mark.slow),
        pytest.param("llama4_text", {"intermediate_size": 512, "interleave_moe_layer_step": 1}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"moe_intermediate_size": 512}, marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_real_experts(model_type: str, sizes: dict[str, Any]) -> None:
    """The router's indices add at most 2 % to these narrow experts. Llama 4 makes the rows before it calls them."""
    model = from_config(AutoConfig.for_model(model_type, **SMALL | sizes), torch.bfloat16, "eager").eval()
    [experts] = (work := walk(model)).of_kind(Experts)
    module, tokens = called_modules(model, work)[experts][0], 512
    peaks, forward = [], module.forward

    def tracked(*args: Any, **kwargs: Any) -> Any:
        with _Peak() as peak:
            result = forward(*args, **kwargs)
        peaks.append(peak.peak_bytes)
        return result

    module.forward = tracked
    with torch.no_grad():
        model(torch.arange(tokens)[None] % SMALL["vocab_size"], use_cache=False)
    counted = 2 * tokens * experts.rows_per_token * experts.row_elements
    assert counted * (0.8 if experts.runs_all else 0.98) < peaks[0] < counted * 1.02


LATENT = {"kv_lora_rank": 32, "q_lora_rank": 48, "head_dim": 16, "num_key_value_heads": 4, "v_head_dim": 32}
LATENT |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 32}
INDEXED = LATENT | {"index_n_heads": 32, "index_head_dim": 32, "index_topk": 8}
INDEXED |= {"layer_types": ["indexed_attention"] * 2}


@pytest.mark.parametrize(
    ("model_type", "sizes", "batch", "prompt"),
    [("llama", {}, 64, 8), ("youtu", LATENT, 64, 8), ("gemma3_text", {}, 64, 8), ("deepseek_v32", INDEXED, 1, 1024)],
)
def test_the_peak_of_a_prefill(model_type: str, sizes: dict[str, int], batch: int, prompt: int) -> None:
    """Short prompts have few scores; hidden states of 256 are wider than some inputs. An indexer has scores too."""
    config = AutoConfig.for_model(model_type, **SMALL | {"intermediate_size": 1024} | sizes)
    model = build_on_meta(config, torch.bfloat16, attn="eager").eval()
    with torch.no_grad(), _Peak() as peak:
        model(torch.zeros(batch, prompt, dtype=torch.long, device="meta"), logits_to_keep=1)
    need = memory_need(walk(model), 0, Step(batch, prompt, 0), 0, ExecutionPath(attention="eager"))
    assert need.peak_bytes == pytest.approx(peak.peak_bytes, rel=0.04)


def test_the_copies_of_a_decode_step() -> None:
    """8 sequences use 2 experts each, of three matrices of 256 x 128; hidden states add at most 3 %."""
    model = from_config(AutoConfig.for_model("mixtral", **SMALL), torch.bfloat16, "eager").eval()
    model.set_experts_implementation("batched_mm")
    [experts] = walk(model).of_kind(Experts)
    step, path = Step(8, 1, 1), ExecutionPath(gathers_experts=True)
    with torch.no_grad():
        cache = model(torch.zeros(8, 1, dtype=torch.long)).past_key_values
        with _Peak() as peak:
            model(torch.arange(8)[:, None], past_key_values=cache)
    copied_bytes = 8 * 2 * 3 * 256 * 128 * 2
    assert experts.gathered_bytes(step, path) == copied_bytes
    assert copied_bytes < peak.peak_bytes < 1.03 * copied_bytes
    assert experts.gathered_bytes(Step(8, 2, 0), path) == experts.gathered_bytes(step, ExecutionPath()) == 0


@pytest.mark.parametrize(("shared", "top_k"), [(2, 6), (3, 2)])
def test_every_token_runs_all_shared_experts(shared: int, top_k: int) -> None:
    """Inkling's shared experts are a bank too; each has three matrices of 64 x 32, of 2 bytes."""
    [config] = configs("inkling_text")
    config.n_shared_experts, config.num_experts_per_tok = shared, top_k
    work = walk(build_on_meta(config, torch.bfloat16))
    [bank] = [operator for operator in work.of_kind(Experts) if "shared" in operator.name]
    for tokens in (1, 2, 3):
        done = bank.each(Step(tokens, 1, 8), ExecutionPath())
        expected = shared * 3 * 64 * 32 * 2
        assert (done.weight_bytes, done.model_flops) == (expected, tokens * expected)
    with pytest.raises(ValueError, match="cannot use"):
        replace(bank, per_token=shared + 1)


def test_the_copies_of_mixtral() -> None:
    """One token copies two of the experts that it reads anyway; 32 sequences copy 64, more than all of a layer."""
    work = counted_model(resolve("mixtral-8x7b")).work
    copied_bytes, path = 2 * 3 * 4096 * 14336 * 2, path_on(work, "sdpa", fuses_grouped_heads=True)
    [experts] = work.of_kind(Experts)
    assert experts.each(Step(1, 1, 512), path).avoidable_bytes == {Cause.GATHERED_EXPERTS: 2 * copied_bytes}
    assert memory_need(work, 0, Step(32, 1, 511), 1, path).workspace_bytes == 32 * copied_bytes
    server = need_of_batch(work, 0, 32, 1, 1, path, together=False)
    assert server.workspace_bytes < copied_bytes


def test_the_need_of_mixtral() -> None:
    """A row is 4,096 in, gate and up of 14,336 each, the gate's result and their product: two rows per token."""
    work = counted_model(resolve("mixtral-8x7b")).work
    need = memory_need(work, 0, Step(8, 2048, 0), 0, ExecutionPath())
    assert need.workspace_bytes == 8 * 2048 * 2 * (4 * 4096 + 2 * (4096 + 4 * 14336))
    assert need.fragmentation_bytes == 2.5 * 8 * 2048 * 2 * 2 * 2 * 14336
