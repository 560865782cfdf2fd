"""The cross-check also works with other versions of torch and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shrink import configs
from small_models import small_model

from profiler.counting.count import count
from profiler.counting.crosscheck import CounterDifference, crosscheck
from profiler.facts.step import Step

# small_model("Llama")
HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 16, 2


def by_hand(batch: int, query: int, context: int) -> int:
    """Return a step's FLOPs in eager attention: each layer's matrices and full square, and the head on one position."""
    hidden = HEADS * WIDTH
    linears = hidden * (2 * HEADS + 2 * KV_HEADS) * WIDTH + 3 * hidden * 96
    square = 2 * HEADS * query * (query + context) * WIDTH
    return 2 * batch * (LAYERS * (query * linears + square) + hidden * 128)


@pytest.mark.parametrize(("batch", "query", "context"), [(2, 8, 0), (1, 1, 5)])
def test_both_counts_are_those_by_hand(batch: int, query: int, context: int) -> None:
    check = crosscheck(small_model("Llama", attn_implementation="eager"), Step(batch, query, context))
    assert check.equal, check.differences
    assert check.flops == check.walk_flops == by_hand(batch, query, context)
    # `inv_freq @ position_ids` up to transformers 5.17: [width / 2, 1] x [1, query], once for all sequences.
    assert set(check.left_out) <= {CounterDifference("model.rotary_emb", 0, 2 * query * WIDTH // 2)}


def test_a_model_without_a_choice_of_logits_computes_all_of_them(tmp_path: Path) -> None:
    """TrOCR's decoder has 20,000 words, so the peak has 4 x 64 rows of logits, their inputs and the cache."""
    [config] = configs("trocr")
    config.vocab_size, config.architectures, config.max_position_embeddings = 20_000, ["TrOCRForCausalLM"], 512
    config.save_pretrained(tmp_path)
    counted = count(
        str(tmp_path), phase="prefill", batch=4, prompt=64, dtype="bfloat16", attn="eager", gpu_names="L4",
        second_opinion=True,
    )  # fmt: skip
    assert counted.crosscheck.equal, counted.crosscheck.differences
    assert counted.work.executed_flops == counted.crosscheck.flops
    cache_bytes, logits_bytes = 4 * 64 * 4 * 2 * 64 * 2, 4 * 64 * (64 + 20_000) * 2
    assert counted.gpus[0].needs_bytes == counted.whole.weight_bytes + cache_bytes + logits_bytes


def test_rotary_angles_that_are_a_matrix_product_are_named_and_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 uses such a product (models/llama/modeling_llama.py, `LlamaRotaryEmbedding`)."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = self.inv_freq[None, :, None].expand(position_ids.shape[0], -1, 1).float()
        angles = (frequencies @ position_ids[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", forward)
    check = crosscheck(small_model("Llama", attn_implementation="eager"), Step(3, 8, 0))
    assert check.equal, check.differences
    assert check.flops == by_hand(3, 8, 0)
    assert check.left_out == (CounterDifference("model.rotary_emb", 0, 2 * 1 * 8 * WIDTH // 2),)
