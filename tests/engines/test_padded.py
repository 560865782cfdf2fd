"""A padded batch gives the tokens of each of its prompts in a batch of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import small_model
from transformers import GPT2Config, GPT2LMHeadModel

from profiler.device.machine import machine_for
from profiler.engines.transformers import EagerEngine, PaddedEngine
from profiler.grid.cells import Cell
from profiler.grid.ragged import Request

LENS = (3, 12, 7)
NEW = 6
GPT2 = GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=128)


@pytest.mark.parametrize(
    "model",
    [small_model("Llama"), small_model("Mistral", sliding_window=8), GPT2LMHeadModel(GPT2).eval()],
    ids=lambda model: model.config.model_type,
)
def test_tokens_are_those_of_each_prompt_in_a_batch_of_one(model: Any) -> None:
    machine = machine_for(torch.device("cpu"))
    prompts = [torch.randint(1, 64, (1, length)) for length in LENS]
    ids = torch.full((len(LENS), max(LENS)), 63)
    for row, prompt in enumerate(prompts):
        ids[row, max(LENS) - LENS[row] :] = prompt
    batch = tuple(Request(length, NEW) for length in LENS)
    cell = Cell(len(LENS), max(LENS), NEW, engine="padded")
    padded = PaddedEngine(model, machine, {cell: batch}.get)
    padded.announce(cell, None)
    with torch.inference_mode():
        tokens = padded.call(ids, NEW, lambda: None)
        singles = [EagerEngine(model, machine).call(prompt, NEW, lambda: None) for prompt in prompts]
        # Without the mask the short prompts give other tokens, so the mask is effective.
        unmasked = EagerEngine(model, machine).call(ids, NEW, lambda: None)
    assert torch.equal(tokens, torch.cat(singles))
    assert not torch.equal(unmasked, tokens)


def test_a_filled_cache_masks_the_padding() -> None:
    cell = Cell(len(LENS), max(LENS), NEW, engine="padded")
    batch = tuple(Request(length, NEW) for length in LENS)
    engine = PaddedEngine(small_model("Llama"), machine_for(torch.device("cpu")), {cell: batch}.get)
    engine.announce(cell, None)
    with torch.inference_mode():
        state = engine.fill(len(LENS), 15, 20)
        assert state.mask_BS.sum(-1).tolist() == [15 - (12 - length) for length in LENS]
        assert engine.decode(state).mask_BS.shape == (3, 16)
