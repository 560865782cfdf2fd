"""Prompts that begin like the previous one are tried with its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from planted_faults import changes_to, tiny_llama
from transformers import DynamicCache


def generate_each(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> None:
    for prompt in prompts:
        ids = torch.tensor([prompt])
        model.generate(ids, **{"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, **options})


DOCUMENT = list(range(1, 61)) + list(range(1, 21))
QUESTIONS = [[*DOCUMENT, *range(40, 40 + length)] for length in (4, 6, 5, 5)]


def test_a_document_is_computed_once_for_all_questions() -> None:
    """Prompts have 80 tokens of a document and about 5 of a question. Only the first has to compute the document."""
    model = tiny_llama()
    found = changes_to(lambda: generate_each(model, QUESTIONS))["shared-prefix"]
    # 84 + 86 + 85 + 85 tokens. The second question begins with the four tokens of the first, and so on.
    assert found.evidence == "74 % of the tokens of 4 prompts are those of the prompt before, computed again"
    assert "copy.deepcopy of their past_key_values" in found.change
    computed: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _module, args, _output: computed.append(args[0].shape[1]))
    found.as_is()
    assert computed == [84, 1, 1, 86, 1, 1, 85, 1, 1, 85, 1, 1]
    found.changed()
    for _ in range(2):  # the cache is cropped for each run
        computed.clear()
        found.changed()
        assert computed == [84, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1]


def test_a_chat_passes_its_cache_on() -> None:
    model = tiny_llama()
    turns = [DOCUMENT[: 64 + 8 * turn] for turn in range(3)]
    found = changes_to(lambda: generate_each(model, turns))["shared-prefix"]
    assert found.change == "pass past_key_values with the next prompt"


@pytest.mark.parametrize("reason", ["few tokens", "padding", "a cache"])
def test_other_prompts_share_nothing(reason: str) -> None:
    model = tiny_llama()
    prompts, options = QUESTIONS, {}
    if reason == "few tokens":
        prompts = [prompt[40:] for prompt in prompts]
    elif reason == "padding":
        prompts = [[0] * 80 + prompt[80:] for prompt in prompts]
        options["attention_mask"] = torch.tensor([[0] * 80 + [1] * 4])
        prompts = [prompt[:84] for prompt in prompts]
    else:
        options["past_key_values"] = DynamicCache(config=model.config)
        prompts = [DOCUMENT[: 64 + 8 * turn] for turn in range(3)]
    assert "shared-prefix" not in changes_to(lambda: generate_each(model, prompts, **options))
