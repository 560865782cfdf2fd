"""An engine for prompts of unequal lengths: padded on the left, with mask and positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from profiler.device.machine import Machine
from profiler.engines.base import DecodeState
from profiler.engines.caches import deepen, greedy_token
from profiler.engines.transformers import EagerEngine
from profiler.errors import RequestError
from profiler.grid.cells import Cell
from profiler.grid.ragged import PADDED_ENGINE, Batch
from profiler.loading.cache_argument import cache_of


@dataclass
class PaddedState(DecodeState):
    """A state with the mask of its padding."""

    mask_BS: torch.Tensor  # noqa: N815  [batch, cached], 0 at padding
    position_B1: torch.Tensor  # noqa: N815  [batch, 1], of the last token


class PaddedEngine(EagerEngine):
    """Eager steps with an attention mask and position ids, as `generate` makes them (generation/utils.py, 5.23).

    The announced cell gives the length of each prompt. For any other shape (a twin, a short model) the first prompt is
    half as long as the others, so that the mask is effective there as well.
    """

    name = PADDED_ENGINE
    pads = True

    def __init__(self, model: Any, machine: Machine, batch_of: Callable[[Cell], Batch | None] | None = None) -> None:
        super().__init__(model, machine)
        parameters = inspect.signature(model.forward).parameters
        if "attention_mask" not in parameters:
            raise RequestError(f"{type(model).__name__} takes no attention mask, so its prompts cannot be padded.")
        self._takes_positions = "position_ids" in parameters
        self._batch_of = batch_of
        self._lens: tuple[int, ...] = ()

    def announce(self, cell: Cell, steps: int | None) -> None:
        self.pad(self._batch_of(cell) if self._batch_of else None)

    def pad(self, batch: Batch | None) -> None:
        """Set the lengths of the next prompts; None for prompts of one length."""
        self._lens = tuple(request.prompt_len for request in batch or ())

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> PaddedState:  # noqa: N803
        mask_BS = self._mask(*ids_BS.shape)  # noqa: N806
        position_BS = (mask_BS.cumsum(-1) - 1).clamp(min=0)  # noqa: N806
        output = self._model(
            input_ids=ids_BS, attention_mask=mask_BS, use_cache=True, **self._at(position_BS), **self._prefill_options
        )
        return PaddedState(cache_of(output), greedy_token(output), mask_BS, position_BS[:, -1:])

    def fill(self, batch: int, context: int, slots: int) -> PaddedState:
        state = super().fill(batch, 1, slots)
        deepen(state.cache, context)
        mask_BS = self._mask(batch, max(1, *self._lens) if len(self._lens) == batch else context)  # noqa: N806
        mask_BS = torch.cat([mask_BS, mask_BS.new_ones(batch, max(0, context - mask_BS.shape[1]))], dim=1)  # noqa: N806
        return PaddedState(state.cache, state.token_B1, mask_BS[:, :context], mask_BS.sum(-1, keepdim=True) - 1)

    def decode(self, state: DecodeState) -> PaddedState:
        assert isinstance(state, PaddedState)
        mask_BS = torch.cat([state.mask_BS, state.mask_BS.new_ones(state.mask_BS.shape[0], 1)], dim=1)  # noqa: N806
        position_B1 = state.position_B1 + 1  # noqa: N806
        output = self._model(
            input_ids=state.token_B1,
            attention_mask=mask_BS,
            use_cache=True,
            **{self._cache_name: state.cache},
            **self._at(position_B1),
        )
        return PaddedState(cache_of(output), greedy_token(output), mask_BS, position_B1)

    def _at(self, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"position_ids": positions} if self._takes_positions else {}

    def _mask(self, batch: int, tokens: int) -> torch.Tensor:
        """1 where a prompt of [batch, tokens] has a token, 0 where it is padded."""
        announced = len(self._lens) == batch and max(self._lens) == tokens
        lens = self._lens if announced else (tokens - tokens // 2, *[tokens] * (batch - 1))
        device = self._model.device
        padding_B1 = tokens - torch.tensor(lens, device=device)[:, None]  # noqa: N806
        return (torch.arange(tokens, device=device)[None, :] >= padding_B1).long()
