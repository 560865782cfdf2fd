"""Separate forwards of single texts are tried as one batch if they do not depend on each other."""

from __future__ import annotations

import torch
from planted_faults import changes_to, tiny_llama


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
