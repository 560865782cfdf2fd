"""What is recorded of a call: the batch that the model gets, the calls of `generate_batch`, repeated encoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted_faults import changes_to, tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast

from profiler.why_slow.findings import judge_calls
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.render import call_rows


@pytest.mark.parametrize(
    ("rows", "options", "computed", "words"),
    [
        (1, {"do_sample": True, "num_return_sequences": 64}, 64, "64 answers"),
        (2, {"do_sample": True, "num_return_sequences": 3}, 6, "3 answers"),
        (2, {"num_beams": 4}, 8, "4 beams"),
        (1, {"num_beams": 4, "num_return_sequences": 3}, 4, "4 beams, 3 answers"),
        (2, {"do_sample": False}, 2, "sdpa"),
    ],
)
def test_a_call_has_the_batch_that_is_computed(rows: int, options: dict[str, Any], computed: int, words: str) -> None:
    model, recorder, shapes = tiny_llama(), Recorder(), list[tuple[int, ...]]()
    model.model.layers[0].register_forward_pre_hook(lambda _layer, args: shapes.append(tuple(args[0].shape[:2])))
    with watched(recorder):
        model.generate(torch.ones(rows, 8, dtype=torch.long), max_new_tokens=3, **options)
    seen = recorder.seen("s.py")
    [call] = seen.calls
    assert set(shapes) == {(computed, 8), (computed, 1)}, "the prompt is computed for every beam and answer"
    assert (call.batch_size, call.words) == (computed, f"generate {computed} x 8 + 3")
    assert call_rows(judge_calls(seen, []))[0][-1].endswith(words)


GENERATION = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
BATCHING = ContinuousBatchingConfig(page_size=32, num_blocks=8, max_batch_tokens=64)
PROMPTS = [[3] * length for length in (4, 8, 6, 2)]


def test_its_forwards_belong_to_the_line_of_the_call() -> None:
    """Two prompts of 4 and 8 tokens, three new tokens each."""
    model, recorder = tiny_llama(), Recorder()
    with watched(recorder):
        model.generate_batch(PROMPTS[:2], GENERATION, BATCHING)
    [call] = recorder.seen("s.py").calls
    assert (call.words, call.settings.cache_class) == ("generate 2 x 6 + 3", "PagedAttentionCache")
    assert call.where.startswith("test_recorded_calls.py:")
    assert call.forwards >= 3


@pytest.mark.slow
def test_prompts_one_by_one_are_tried_in_one_call() -> None:
    model = tiny_llama()
    found = changes_to(lambda: [model.generate_batch([each], GENERATION, BATCHING) for each in PROMPTS])
    answers = found["one-by-one"].changed()
    assert [len(each.prompt_ids) for each in answers.values()] == [4, 8, 6, 2]  # type: ignore[attr-defined]
    assert "one-by-one" not in changes_to(lambda: model.generate_batch(PROMPTS, GENERATION, BATCHING))


def test_only_repeated_encoding_is_recorded() -> None:
    """One line encodes a text three times, so two of them are repeats. Prefixes are decoded twice."""
    words = Tokenizer(models.WordLevel({"?": 0, "one": 1, "two": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer, recorder = PreTrainedTokenizerFast(tokenizer_object=words), Recorder()
    with watched(recorder):
        for _ in range(3):
            ids = tokenizer("one two one two")["input_ids"]
        assert [tokenizer.decode(ids[:end]) for end in (1, 2, 1, 2)] == ["one", "one two"] * 2
        assert tokenizer.batch_decode([ids[:1], ids[:1]]) == tokenizer.batch_decode([ids[:1], ids[:1]])
    assert [len(seconds) for seconds in recorder.again_s.values()] == [2]
    assert recorder.text_s > 0
