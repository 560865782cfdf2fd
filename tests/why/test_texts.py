"""Repeated encoding is recorded. Repeated decoding, which streams need, is not."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder


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
    assert [item.count for item in recorder.again.values()] == [2]
    assert recorder.text_s > 0
