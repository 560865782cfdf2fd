"""The reported batch size of `generate` with beams or several answers is the batch that the model gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted_faults import tiny_llama

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
