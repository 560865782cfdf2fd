"""The count of a grid is equal to the count of each step, and to arithmetic from published widths."""

from __future__ import annotations

import random

import pytest
from cases import slow_except

from profiler.counting.cache import counted_model
from profiler.counting.count import count
from profiler.counting.grid_count import GridCount, count_grid
from profiler.counting.model_numbers import ModelNumbers, model_numbers
from profiler.data.roof_set import roofs_called
from profiler.loading.source import resolve


def grid_of(model: str, *, gpus: str = "", **sizes: list[int]) -> GridCount:
    lens = {"batch_sizes": [1], "prompt_lens": [], "context_lens": [], **sizes}
    roofs = [roofs_called(name) for name in gpus.split(",") if name]
    return count_grid(model, counted_model(resolve(model)), "none", gpus=roofs, **lens)


MODELS = ("smollm2-135m", "mixtral-8x7b", "gemma-2-9b", "deepseek-v2-lite")


@pytest.mark.parametrize("model", slow_except(MODELS[:2], MODELS))
def test_each_point_is_the_count_of_its_step(model: str) -> None:
    """Dense, windowed, latent and mixture-of-experts models, at sizes drawn at random."""
    rng = random.Random(model)
    batches, lens = rng.sample(range(1, 65), 2), rng.sample(range(1, 2000), 2)
    grid = grid_of(model, batch_sizes=batches, prompt_lens=lens, context_lens=lens)
    for n in rng.sample(range(len(grid)), 3):
        batch, depth = int(grid.batch_size[n]), int(grid.depth[n])
        step = count(model, phase=grid.phases[n], batch=batch, prompt=depth)
        assert grid.model_flops[n] == pytest.approx(float(step.work.model_flops), rel=1e-12)
        assert grid.model_bytes[n] == pytest.approx(float(step.work.model_bytes), rel=1e-12)


def test_mistral_7b_under_a_t4() -> None:
    """Reading 14.5 GB of weights at 320 GB/s (datasheet) takes 45 ms. A T4 has room for one sequence, not sixteen."""
    grid = grid_of("mistral-7b-v0.1", gpus="T4", batch_sizes=[1, 16], prompt_lens=[512], context_lens=[512, 2048])
    [t4] = grid.gpus
    decode = grid.phases.index("decode")
    assert t4.floor_s[decode] == pytest.approx(45e-3, rel=0.02)
    assert grid.tokens[decode] / t4.floor_s[decode] == pytest.approx(22.4, rel=0.02)
    assert dict(zip(zip(grid.phases, grid.batch_size, grid.depth, strict=True), t4.bound, strict=True)) == {
        ("prefill", 1, 512): "compute",
        ("prefill", 16, 512): "compute",
        **{("decode", batch, depth): "memory" for batch in (1, 16) for depth in (512, 2048)},
    }
    # KV: 2 x 32 layers x 8 heads x 128 x 2 bytes per token; a T4 has room for 0.98 x (14.56 GiB - 0.45 GB) = 14.9 GB.
    # Its attention writes scores of 4 bytes for 32 heads, and their softmax: 1.1 GB for a prompt of 2048 tokens.
    assert grid.cache_bytes[-1] == 16 * 2049 * 2 * 32 * 8 * 128 * 2
    assert list(t4.fits) == [True, False, True, False, False, False]


@pytest.fixture(scope="module")
def llama() -> ModelNumbers:
    roofs = (roofs_called("H100 SXM"), roofs_called("T4"))
    return model_numbers(counted_model(resolve("llama-2-7b")), 512, roofs)


def test_numbers_of_llama_2_7b(llama: ModelNumbers) -> None:
    """Widths of arXiv:2307.09288: 32 layers, width 4096, 32 heads of 128, feed-forward 11008, vocabulary 32000."""
    widths = llama.architecture
    assert (widths.layers, widths.hidden_size, widths.query_heads, widths.kv_heads) == (32, 4096, 32, 32)
    assert (widths.head_dim, widths.vocabulary, widths.experts) == (128, 32000, 0)
    projections, mlp, head = 32 * 4 * 4096**2, 32 * 3 * 4096 * 11008, 4096 * 32000
    assert llama.params_by_group["attention_proj"] == projections
    assert llama.params_by_group["mlp"] == mlp
    assert llama.params_by_group["lm_head"] == head
    assert sum(llama.params_by_group.values()) == 6_738_415_616
    assert llama.kv_bytes_per_token == 2 * 32 * 4096 * 2
    assert llama.kv_bytes_per_sequence == 512 * llama.kv_bytes_per_token
    assert llama.kv_equals_weights_at == -(-2 * 6_738_415_616 // llama.kv_bytes_per_token)
    # 2 FLOPs per weight, and 4 x width FLOPs per cached token and layer (the new token is one of them).
    assert llama.attention_is_half_at == pytest.approx(2 * (projections + mlp + head) / (4 * 4096 * 32), abs=1)


def test_what_gpus_allow_llama_2_7b(llama: ModelNumbers) -> None:
    """Linears are compute-bound from 989 TFLOP/s x 2 bytes / (2 x 3.35 TB/s) = 295 rows.

    The step never is, because the cache of all heads outweighs the linears.
    """
    h100, t4 = llama.gpus
    assert h100.linears_compute_bound_from_batch == pytest.approx(295, abs=3)
    assert h100.compute_bound_from_batch is None
    assert h100.tokens_per_s_at_most == pytest.approx(3.35e12 / (13.2e9 + 0.27e9), rel=0.02)
    # A sequence needs its cache, a copy of one layer's, and three MLP tensors of 11008 and three of 4096 per token.
    room = 0.98 * (14.56 * 2**30 - 450e6)
    sequence = 513 * llama.kv_bytes_per_token * 33 / 32 + 512 * (3 * 11008 + 3 * 4096) * 2
    assert t4.largest_batch == int((room - 2 * 6_738_415_616) / sequence)
