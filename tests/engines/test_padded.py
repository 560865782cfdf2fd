"""A padded batch gives the tokens of each of its prompts in a batch of one."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig

from profiler.device.machine import machine_for
from profiler.engines.transformers import EagerEngine, PaddedEngine
from profiler.grid.cells import Cell
from profiler.grid.ragged import Request

LENS = (3, 12, 7)
NEW = 6
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 64}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=2),
        MistralConfig(**SIZES, intermediate_size=64, num_key_value_heads=2, sliding_window=8),
        GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=64),
    ],
    ids=lambda config: config.model_type,
)
def test_tokens_are_those_of_each_prompt_in_a_batch_of_one(config: object) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
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
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, intermediate_size=64), dtype=torch.float32).eval()
    cell = Cell(len(LENS), max(LENS), NEW, engine="padded")
    engine = PaddedEngine(model, machine_for(torch.device("cpu")), {cell: tuple(Request(n, NEW) for n in LENS)}.get)
    engine.announce(cell, None)
    with torch.inference_mode():
        state = engine.fill(len(LENS), 15, 20)
        assert state.mask_BS.sum(-1).tolist() == [15 - (12 - length) for length in LENS]
        assert engine.decode(state).mask_BS.shape == (3, 16)
