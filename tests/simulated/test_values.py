"""The few values that a simulated card knows, and the branches of transformers that depend on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.masking_utils import create_causal_mask
from transformers.utils.import_utils import is_fake_tensor, is_tracing

from .native import why_not
from .truth import A100, H100, T4, Truth
from .world import World, simulated

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SLOTS = 24
ATTENTION = ("attention", "bmm")
"""Parts of the names of attention kernels: fused ones, and the products of the math path."""


@pytest.fixture
def world() -> Iterator[World]:
    with simulated(H100) as world:
        yield world


def llama() -> Any:
    """Return a Llama of one layer with grouped heads, in float16."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return LlamaForCausalLM(config).to(torch.float16).eval()


def prefill(model: Any, cache: StaticCache | None) -> None:
    ids = torch.zeros(2, 16, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)


def attention(world: World, model: Any, cache: StaticCache | None) -> list[tuple[str, float]]:
    """Return the name and FLOPs of each attention kernel of a prefill."""
    world.card.log = log = []
    prefill(model, cache)
    world.card.log = None
    return [
        (kernel.work.name, kernel.work.flops) for kernel in log if any(part in kernel.work.name for part in ATTENTION)
    ]


def test_a_mask_is_skipped_for_a_reset_cache_on_a_cpu() -> None:
    """This test uses real tensors. The simulated card must agree with them."""
    model = llama().float()
    cache = StaticCache(config=model.config, max_cache_len=SLOTS)
    prefill(model, cache)
    asked = {"config": model.config, "inputs_embeds": torch.zeros(2, 16, 256), "attention_mask": None}
    assert create_causal_mask(**asked, past_key_values=cache) is not None, "it holds 16 tokens"
    cache.reset()
    assert isinstance(cache.get_seq_length(), torch.Tensor)
    assert create_causal_mask(**asked, past_key_values=cache) is None


def test_transformers_takes_the_tensors_of_a_card_for_real_ones() -> None:
    with simulated(H100):
        tensor = torch.zeros(1, device="cuda")
        assert not is_fake_tensor(tensor)
        assert not is_tracing(tensor)


@pytest.mark.parametrize("truth", [H100, A100, T4], ids=lambda truth: truth.name)
def test_prefills_of_one_shape_attend_by_one_kernel(truth: Truth) -> None:
    with simulated(truth) as world:
        model = llama().to("cuda")
        eager = attention(world, model, None)
        cache = StaticCache(config=model.config, max_cache_len=SLOTS)
        assert eager
        assert attention(world, model, cache) == eager, "a new static cache"
        cache.reset()
        assert attention(world, model, cache) == eager, "a static cache that was reset"
        assert attention(world, model, cache) != eager, "a static cache that holds tokens needs a mask"


def test_a_length_on_the_card_is_read_by_waiting(world: World) -> None:
    length = torch.tensor(0).to("cuda")
    large = torch.zeros(300 << 20, dtype=torch.uint8, device="cuda")
    large.add_(1)
    assert world.host.now_s < world.card.stream.ready_s
    assert bool(length == 0)
    assert world.host.now_s >= world.card.stream.ready_s


def test_a_value_is_known_until_a_kernel_writes_it(world: World) -> None:
    """A kernel writes in place, through a view, or by a replay; a capture runs nothing."""
    length = torch.tensor(3).to("cuda")
    length.add_(4)
    assert int(length) == 7
    assert int(length[None][0]) == 7
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        length.add_(1)
    assert int(length) == 7
    graph.replay()
    assert int(length) == 1, "an unknown value reads as one"
    length.zero_()
    assert not bool(length)
    mask = torch.ones(4, 5, dtype=torch.bool).to("cuda")
    assert int(mask[:, :2].sum()) == 8, "as transformers asks (masking_utils.py, `fast_all`)"
    mask[:, 1].fill_(False)
    assert int(mask.sum()) != 20
