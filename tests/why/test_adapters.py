"""Adapters that are not merged are recognised by what a module computes, and the model is as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted_faults import changes_to, tiny_llama
from torch import nn

from profiler.why_slow.weight_changes import unmerged_adapters

IDS = torch.ones(1, 8, dtype=torch.long)


class LowRank(nn.Module):
    """LoRA with children (Hu et al. 2021): W x + B A x."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Decomposed(LowRank):
    """DoRA (Liu et al. 2024): the rows of W + B A, with norms of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.base.weight + self.up.weight @ self.down.weight
        return nn.functional.linear(x, weight / weight.norm(dim=1, keepdim=True))


class Bottleneck(LowRank):
    """An adapter with an activation, which has no equal weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x).relu())


def adapted(kind: Any) -> Any:
    model = tiny_llama(num_hidden_layers=2)
    for layer in model.model.layers:
        layer.self_attn.q_proj = kind(layer.self_attn.q_proj)
        layer.mlp.up_proj = kind(layer.mlp.up_proj)
    return model.eval()


@pytest.mark.parametrize("kind", [LowRank, Decomposed])
def test_an_adapter_is_tried_merged_and_the_model_is_as_before(kind: Any) -> None:
    model = adapted(kind)
    with torch.no_grad():
        before = model(IDS).logits
    found = changes_to(lambda: model(IDS))["unmerged-adapters"]
    assert found.evidence == f"4 linears compute an adapter next to their weight ({kind.__name__})"
    with found.within():
        assert not [each for each in model.modules() if isinstance(each, LowRank)]
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("model", [tiny_llama(), adapted(Bottleneck)], ids=["none", "bottleneck"])
def test_what_has_no_equal_weight_is_no_adapter(model: Any) -> None:
    assert list(unmerged_adapters(model)) == []
