"""Calls of `generate_batch` belong to the line of the script, with the forwards of transformers' own thread."""

from __future__ import annotations

import pytest
from planted_faults import changes_to, tiny_llama
from transformers import ContinuousBatchingConfig, GenerationConfig

from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder

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
    assert call.where.startswith("test_paged.py:")
    assert call.forwards >= 3


@pytest.mark.slow
def test_prompts_one_by_one_are_tried_in_one_call() -> None:
    model = tiny_llama()
    found = changes_to(lambda: [model.generate_batch([each], GENERATION, BATCHING) for each in PROMPTS])
    answers = found["one-by-one"].changed()
    assert [len(each.prompt_ids) for each in answers.values()] == [4, 8, 6, 2]  # type: ignore[attr-defined]
    assert "one-by-one" not in changes_to(lambda: model.generate_batch(PROMPTS, GENERATION, BATCHING))
