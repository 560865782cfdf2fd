"""Prompts, and their greedy tokens by an engine and by transformers' own generate."""

from typing import Any

import torch

from profiler.engines.base import Engine


def greedy_tokens(engine: Engine, ids_BS: torch.Tensor, new_tokens: int) -> torch.Tensor:  # noqa: N803
    """Return `new_tokens` greedy tokens per prompt, [batch, new_tokens], by the calls that are also timed."""
    with torch.inference_mode():
        return engine.call(ids_BS, new_tokens, lambda: None)


def tokens_of_generate(model: Any, ids_BS: torch.Tensor, new_tokens: int, **options: Any) -> torch.Tensor:  # noqa: N803
    greedy = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens: torch.Tensor = model.generate(ids_BS, max_new_tokens=new_tokens, **greedy, **options)
    return tokens[:, ids_BS.shape[1] :]


def random_prompt(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Return tokens below 128, [batch, length]."""
    return torch.randint(0, 128, (batch, length), generator=torch.Generator().manual_seed(seed))
