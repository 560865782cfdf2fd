"""What an engine's own scheduler reports, and whether its iterations form one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from profiler.errors import RequestError


@dataclass(frozen=True)
class Scheduled:
    """Iterations in a row that a scheduler filled alike."""

    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_tokens: int
    """One for each such request, and more where one that was preempted is computed again."""
    waiting: int
    """Requests that hold no cache when it ends: not begun yet, or preempted."""
    iterations: int = 1


@dataclass(frozen=True)
class OwnedModel:
    """What an engine holds that owns its model and its cache."""

    version: str
    load_s: float
    """Seconds to load, compile, capture and warm up, all before the first cell."""
    how: str
    """How a step is issued: as a CUDA graph, compiled, or operator by operator."""
    weight_bytes: int
    cache_bytes: int
    """What is reserved for the cache, filled or not."""
    cache_tokens: int
    block_tokens: int
    """Tokens of one block: a sequence takes whole ones."""
    tokens_an_iteration: int
    """Most tokens that its scheduler puts into one iteration: a longer prefill goes in chunks."""
    cache_used_bytes: int = 0
    """Most of its cache that was in use at once, over all visits of a run."""


def scheduled_of(scheduler_stats: Any) -> Scheduled:
    """One iteration from vLLM's `SchedulerStats` and the `SchedulerIterationDetails` in it.

    Raises RequestError for a vLLM that does not tell its iterations.
    """
    details = getattr(scheduler_stats, "iteration_details", None)
    if details is None:
        raise RequestError("this vLLM does not tell what its scheduler put into an iteration.")
    return Scheduled(
        prefill_requests=details.num_ctx_requests,
        prefill_tokens=details.num_ctx_tokens,
        decode_requests=details.num_generation_requests,
        decode_tokens=details.num_generation_tokens,
        waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
    )


def in_rows(iterations: Sequence[Scheduled]) -> tuple[Scheduled, ...]:
    """Merge consecutive iterations that are alike."""
    return tuple(replace(same, iterations=len(list(group))) for same, group in groupby(iterations))


def prefill_iterations(rows: Sequence[Scheduled]) -> int:
    """Iterations until the last prompt was through: more than one where the prefill went in chunks."""
    last = max((number for number, row in enumerate(rows) if row.prefill_requests), default=-1)
    return sum(row.iterations for row in rows[: last + 1])


def trouble(iterations: Sequence[Scheduled], batch: int, owned: OwnedModel) -> str | None:
    """Why these single iterations are no prefill of `batch` prompts and decode steps of all of them; None if they are.

    A prefill may go in chunks, each as full as the scheduler allows; whoever waits while there is room for more tokens
    waits for the cache. A request that was preempted is computed again, prompt and all, which vLLM's own record counts
    as a generation of many tokens.
    """
    prefill = prefill_iterations(iterations)
    cache = f"its cache of {owned.cache_tokens} tokens (blocks of {owned.block_tokens})"
    for row in iterations[:prefill]:
        if row.waiting and row.prefill_tokens + row.decode_tokens < owned.tokens_an_iteration:
            return f"{row.waiting} of {batch} sequences had to wait until others had ended: {cache} is too small"
    decode = iterations[prefill:]
    if any(row.waiting for row in decode):
        first = next(number for number, row in enumerate(decode, 1) if row.waiting)
        most = max(row.waiting for row in decode)
        again = sum(row.decode_tokens - row.decode_requests for row in decode)
        return (
            f"preempted: {most} of {batch} sequences, from decode step {first} on; {cache} is full,"
            f" {f'and {again} tokens were computed again' if again else 'and none came back'}"
        )
    for number, row in enumerate(decode, 1):
        if (row.decode_requests, row.decode_tokens) != (batch, batch):
            return f"decode step {number} held {row.decode_requests} of {batch} sequences, {row.decode_tokens} tokens"
    return None
