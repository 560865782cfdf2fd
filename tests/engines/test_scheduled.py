"""What a real vLLM's records are read as: prefill, decode, chunks, preemption, waiting."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from profiler.errors import RequestError
from profiler.facts.scheduler import OwnedModel, Scheduled, in_rows, prefill_iterations, scheduled_of, trouble

RECORDS = Path(__file__).parents[1] / "data" / "vllm"
OWNED = OwnedModel("0.32.0", 1.0, "compiled", 1, 1, cache_tokens=1280, block_tokens=128, tokens_an_iteration=256)


def read(name: str) -> tuple[int, int, int, list[Scheduled]]:
    """(batch, prompt length, new tokens, iterations) of a file that vLLM's records were written to."""
    told = json.loads((RECORDS / f"{name}.json").read_text())
    iterations = [scheduled_of(_as_object(record)) for record in told["iterations"]]
    return told["batch"], told["prompt_len"], told["new_tokens"], iterations


def _as_object(record: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{**record, "iteration_details": SimpleNamespace(**record["iteration_details"])})


def test_a_prefill_and_its_decode_steps_are_told_apart() -> None:
    batch, prompt, new_tokens, iterations = read("plain")
    assert in_rows(iterations) == (
        Scheduled(batch, batch * prompt, 0, 0, 0),
        Scheduled(0, 0, batch, batch, 0, iterations=new_tokens - 1),
    )
    assert prefill_iterations(iterations) == 1
    assert trouble(iterations, batch, OWNED) is None


def test_chunks_fill_their_iterations_and_are_no_trouble() -> None:
    """360 prompt tokens at 256 an iteration: 256, and 104 beside the two sequences that are through."""
    batch, prompt, _, iterations = read("chunked")
    assert prefill_iterations(in_rows(iterations)) == 2
    assert [(row.prefill_tokens, row.decode_requests) for row in iterations[:3]] == [(256, 0), (104, 2), (0, 3)]
    assert sum(row.prefill_tokens for row in iterations) == batch * prompt
    assert trouble(iterations, batch, OWNED) is None


def test_a_preemption_is_named_with_what_it_cost() -> None:
    """Ten blocks for six sequences: when each needs its second, 129 tokens deep, four of them find one.

    Two sequences are 2 and 1 tokens ahead of the rest, since the prefill went in chunks.
    """
    batch, prompt, _, iterations = read("preempted")
    assert sum(row.prefill_tokens for row in iterations) == batch * prompt
    told = trouble(iterations, batch, OWNED)
    assert told is not None
    assert told.startswith("preempted: 1 of 6 sequences, from decode step 9 on; its cache of 1280 tokens")
    again = sum(row.decode_tokens - row.decode_requests for row in iterations)
    # What comes back is its prompt and what it had generated, less the one token that is new.
    assert prompt <= again + 1 <= prompt + 30
    assert f"{again} tokens were computed again" in told


def test_who_finds_no_block_waits_although_there_is_room_for_tokens() -> None:
    batch, _, _, iterations = read("waiting")
    told = trouble(iterations, batch, OWNED)
    assert told is not None
    assert told.startswith("1 of 6 sequences had to wait until others had ended: its cache of 1280 tokens")


def test_a_step_without_some_of_its_sequences_is_no_step_of_the_cell() -> None:
    batch, _, _, iterations = read("plain")
    assert "decode step 1 held 3 of 4 sequences" in str(trouble(iterations, batch + 1, OWNED))


def test_a_vllm_that_tells_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match="does not tell"):
        scheduled_of(SimpleNamespace(iteration_details=None, num_waiting_reqs=0))
