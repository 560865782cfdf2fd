"""The census replay: each operator called as the model calls it."""

from __future__ import annotations

import pytest
import torch
from machines import HOST
from torch import nn

from profiler.probes.replay import replay_linears

pytestmark = pytest.mark.cpu


class Seen(nn.Linear):
    """A linear layer that keeps what it was last given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shape, self.strides = tuple(x.shape), x.stride()
        return super().forward(x)


def test_the_last_positions_come_as_a_slice_of_hidden_states() -> None:
    """transformers hands `hidden_states[:, -1:, :]` to the LM head; torch may take another kernel for such strides."""
    layer, head = Seen(8, 8), Seen(8, 16)
    found = replay_linears(
        {"layer": [layer], "head": [head]},
        {"layer": 12, "head": 3},
        HOST,
        dtype=torch.float32,
        budget_s=0.01,
        sliced=["head"],
    )
    assert min(found["layer"]) > 0
    assert (layer.shape, layer.strides) == ((1, 12, 8), (96, 8, 1))
    states = torch.empty(3, 5, 8)[:, -1:, :]
    assert head.shape == tuple(states.shape)
    assert head.strides[0] > states.shape[-1], "the positions before lie in between"
