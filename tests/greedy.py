"""Greedy tokens of an engine."""

from __future__ import annotations

import torch

from profiler.engines.base import Engine


def greedy_tokens(engine: Engine, ids_BS: torch.Tensor, new_tokens: int) -> torch.Tensor:  # noqa: N803
    """Return `new_tokens` greedy tokens per prompt, [batch, new_tokens], by the calls that are also timed."""
    with torch.inference_mode():
        return engine.call(ids_BS, new_tokens, lambda: None)
