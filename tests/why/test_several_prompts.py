"""Prompts that begin like the previous one are tried with its cache, and texts one by one as a batch."""

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


def test_texts_are_tried_as_one_batch() -> None:
    """Six texts of 3 to 8 tokens, each with a mask and labels, become a batch of 6 x 8 padded on the right."""
    model = tiny_llama()

    def run() -> None:
        for length in (8, 3, 6, 4, 7, 5):
            ids = torch.arange(length)[None]
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)

    batched = changes_to(run)["one-by-one"]
    assert batched.evidence == "6 texts are passed one by one"
    assert "with an attention mask" in batched.change
    passed: list[dict[str, torch.Tensor]] = []
    model.register_forward_pre_hook(lambda _, args, named: passed.append(named), with_kwargs=True)
    assert batched.changed().logits.shape[:2] == (6, 8)
    [named] = passed
    assert set(named) == {"input_ids", "attention_mask"}
    assert named["attention_mask"].sum(1).tolist() == [8, 3, 6, 4, 7, 5]
    assert named["attention_mask"][1].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_answers_to_one_prompt_are_tried_as_one_batch() -> None:
    model, ids = tiny_llama(), torch.ones(1, 8, dtype=torch.long)
    mask = torch.ones_like(ids)
    found = changes_to(lambda: [model.generate(ids, attention_mask=mask, max_new_tokens=2) for _ in range(4)])
    assert found["one-by-one"].evidence == "the same prompt is passed 4 times, one by one"
    assert found["one-by-one"].change == "pass it once, with num_return_sequences=4"


def test_forwards_of_a_loop_are_not_batched() -> None:
    """Each forward of a loop needs the previous token, with or without a cache."""
    model = tiny_llama()

    def without_cache() -> None:
        for length in range(3, 12):
            model(torch.ones(1, length, dtype=torch.long))

    def with_cache() -> None:
        for _ in range(4):
            cache = model(torch.ones(1, 4, dtype=torch.long), use_cache=True).past_key_values
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)

    assert "one-by-one" not in changes_to(without_cache)
    assert "one-by-one" not in changes_to(with_cache)


def test_prompts_of_a_model_that_is_loaded_again_are_no_batch() -> None:
    """A handler that loads the model for each request has no second prompt to batch."""
    ids = torch.ones(1, 4, dtype=torch.long)
    kept = [tiny_llama() for _ in range(4)]
    assert "one-by-one" not in changes_to(lambda: [model(ids) for model in kept])
    assert "one-by-one" not in changes_to(lambda: [tiny_llama()(ids) for _ in range(4)])
    assert "one-by-one" in changes_to(lambda: [kept[0](ids) for _ in range(4)])
