"""Engines: how a model is stepped. Each prefills a batch of prompts and then decodes one token a call."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass
class DecodeState:
    """What one decode step hands to the next; stays on the device."""

    cache: Any
    token_B1: torch.Tensor  # noqa: N815  shape suffix: [batch, 1], the last greedy token


class Engine(Protocol):
    """One way to run a causal LM."""

    name: str
    keeps_last_logits: bool
    """Whether the LM head runs on the last position alone in a prefill."""

    def prefill(self, ids_BS: torch.Tensor) -> DecodeState:  # noqa: N803
        """Run the prompts [batch, tokens] and give the state with the first new token."""

    def decode(self, state: DecodeState) -> DecodeState:
        """Run one step: one new token for each sequence."""


class EagerEngine:
    """transformers as it comes: eager dispatch and the cache that the model makes for itself (DynamicCache)."""

    name = "eager"

    def __init__(self, model: Any) -> None:
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        self.keeps_last_logits = "logits_to_keep" in parameters
        self._prefill_options = {"logits_to_keep": 1} if self.keeps_last_logits else {}

    def prefill(self, ids_BS: torch.Tensor) -> DecodeState:  # noqa: N803
        output = self._model(input_ids=ids_BS, use_cache=True, **self._prefill_options)
        return DecodeState(_cache(output), _greedy(output))

    def decode(self, state: DecodeState) -> DecodeState:
        output = self._model(input_ids=state.token_B1, past_key_values=state.cache, use_cache=True)
        return DecodeState(_cache(output), _greedy(output))


ENGINES = {EagerEngine.name: EagerEngine}


def greedy_tokens(engine: Engine, ids_BS: torch.Tensor, new_tokens: int) -> torch.Tensor:  # noqa: N803
    """`new_tokens` greedy tokens for each prompt, [batch, new_tokens], through the same calls that are timed."""
    with torch.inference_mode():
        state = engine.prefill(ids_BS)
        tokens = [state.token_B1]
        for _ in range(new_tokens - 1):
            state = engine.decode(state)
            tokens.append(state.token_B1)
    return torch.cat(tokens, dim=1)


def _cache(output: Any) -> Any:
    """The cache a model hands back: `past_key_values`, or the state of a recurrent model."""
    cache = getattr(output, "past_key_values", None)
    return cache if cache is not None else getattr(output, "cache_params", None)


def _greedy(output: Any) -> torch.Tensor:
    tokens: torch.Tensor = output.logits[:, -1:].argmax(dim=-1)
    return tokens
