"""Records of a real vLLM: prefill, decode, chunks, preemption, waiting."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from profiler.facts.scheduler import OwnedModel, SchedulerIterations, in_rows, prefill_iterations, scheduled_of, trouble

RECORDS = Path(__file__).parents[1] / "data" / "vllm"
OWNED = OwnedModel("0.32.0", 1.0, "compiled", 1, 1, cache_tokens=1280, block_tokens=128, tokens_an_iteration=256)


def read(name: str) -> tuple[int, int, int, list[SchedulerIterations]]:
    """(batch, prompt length, new tokens, iterations) of a file of vLLM's records."""
    document = json.loads((RECORDS / f"{name}.json").read_text())
    iterations = [scheduled_of(_as_object(record)) for record in document["iterations"]]
    return document["batch"], document["prompt_len"], document["new_tokens"], iterations


def _as_object(record: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{**record, "iteration_details": SimpleNamespace(**record["iteration_details"])})


def test_a_prefill_is_distinguished_from_its_decode_steps() -> None:
    batch, prompt, new_tokens, iterations = read("plain")
    assert in_rows(iterations) == (
        SchedulerIterations(batch, batch * prompt, 0, 0, 0),
        SchedulerIterations(0, 0, batch, batch, 0, iterations=new_tokens - 1),
    )
    assert prefill_iterations(iterations) == 1
    assert trouble(iterations, batch, OWNED) is None


def test_a_chunked_prefill_is_accepted() -> None:
    """360 prompt tokens at 256 per iteration: 256, then 104 next to the two sequences that already decode."""
    batch, prompt, _, iterations = read("chunked")
    assert prefill_iterations(in_rows(iterations)) == 2
    assert [(row.prefill_tokens, row.decode_requests) for row in iterations[:3]] == [(256, 0), (104, 2), (0, 3)]
    assert sum(row.prefill_tokens for row in iterations) == batch * prompt
    assert trouble(iterations, batch, OWNED) is None


def test_a_preemption_is_reported_with_its_cost() -> None:
    """Ten blocks for six sequences: when each needs its second, at 129 tokens, only four of them get one.

    Two sequences are 2 and 1 tokens ahead of the rest because of the chunked prefill.
    """
    batch, prompt, _, iterations = read("preempted")
    assert sum(row.prefill_tokens for row in iterations) == batch * prompt
    text = trouble(iterations, batch, OWNED)
    assert text is not None
    assert text.startswith("preempted: 1 of 6 sequences, from decode step 9 on; its cache of 1280 tokens")
    recomputed = sum(row.decode_tokens - row.decode_requests for row in iterations)
    # The prompt and the generated tokens are recomputed, without the one token that is new.
    assert prompt <= recomputed + 1 <= prompt + 30
    assert f"{recomputed} tokens were recomputed" in text


def test_a_sequence_without_a_block_waits_although_there_is_room_for_tokens() -> None:
    batch, _, _, iterations = read("waiting")
    text = trouble(iterations, batch, OWNED)
    assert text is not None
    assert text.startswith("1 of 6 sequences had to wait for others to end: its cache of 1280 tokens")


def test_a_step_without_some_sequences_is_not_a_step_of_the_cell() -> None:
    batch, _, _, iterations = read("plain")
    assert "decode step 1 ran 3 of 4 sequences" in str(trouble(iterations, batch + 1, OWNED))
