"""Reports of an engine's scheduler, and the check that its iterations form one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from profiler.errors import RequestError


@dataclass(frozen=True)
class SchedulerIterations:
    """Consecutive iterations with the same requests and tokens."""

    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_tokens: int
    """One per such request, and more if a preempted request is recomputed."""
    waiting: int
    """Requests without cache at the end: not begun yet, or preempted."""
    iterations: int = 1


@dataclass(frozen=True)
class OwnedModel:
    """The model and cache of an engine that loads the model itself."""

    version: str
    load_s: float
    """Seconds to load, compile, capture and warm up, before the first cell."""
    how: str
    """How a step is issued: as a CUDA graph, compiled, or operator by operator."""
    weight_bytes: int
    cache_bytes: int
    """Bytes reserved for the cache, filled or not."""
    cache_tokens: int
    block_tokens: int
    """Tokens per block; a sequence occupies whole blocks."""
    tokens_an_iteration: int
    """Most tokens per iteration of its scheduler; a longer prefill is split into chunks."""
    attention: str = ""
    """Its attention backends, such as FLASH_ATTN; empty in older runs."""
    linears: str = ""
    """Its kernels for linears, by their class in the engine; empty in older runs."""
    cache_used_bytes: int = 0
    """Peak use of its cache, over all visits of a run."""


def scheduled_of(scheduler_stats: Any) -> SchedulerIterations:
    """Return one iteration from vLLM's `SchedulerStats` with its `SchedulerIterationDetails`.

    Raises RequestError if this vLLM does not report its iterations.
    """
    details = getattr(scheduler_stats, "iteration_details", None)
    if details is None:
        raise RequestError("this vLLM does not report the iterations of its scheduler; install a newer one.")
    return SchedulerIterations(
        prefill_requests=details.num_ctx_requests,
        prefill_tokens=details.num_ctx_tokens,
        decode_requests=details.num_generation_requests,
        decode_tokens=details.num_generation_tokens,
        waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
    )


def in_rows(iterations: Sequence[SchedulerIterations]) -> tuple[SchedulerIterations, ...]:
    """Merge consecutive iterations that are equal."""
    return tuple(replace(one, iterations=len(list(group))) for one, group in groupby(iterations))


def prefill_iterations(rows: Sequence[SchedulerIterations]) -> int:
    """Return the number of iterations until all prompts were processed; more than one for a chunked prefill."""
    last = max((number for number, row in enumerate(rows) if row.prefill_requests), default=-1)
    return sum(row.iterations for row in rows[: last + 1])


def trouble(iterations: Sequence[SchedulerIterations], batch: int, owned: OwnedModel) -> str | None:
    """Return why these iterations are not a prefill of `batch` prompts plus decode steps of all; None if they are.

    A prefill may be split into chunks, each as full as the scheduler allows. A request that waits while there is room
    for more tokens waits for the cache. A preempted request is recomputed with its prompt, which vLLM's record counts
    as a generation of many tokens.
    """
    prefill = prefill_iterations(iterations)
    cache = f"its cache of {owned.cache_tokens} tokens (blocks of {owned.block_tokens})"
    for row in iterations[:prefill]:
        if row.waiting and row.prefill_tokens + row.decode_tokens < owned.tokens_an_iteration:
            return f"{row.waiting} of {batch} sequences had to wait for others to end: {cache} is too small"
    decode = iterations[prefill:]
    if any(row.waiting for row in decode):
        first = next(number for number, row in enumerate(decode, 1) if row.waiting)
        most = max(row.waiting for row in decode)
        recomputed = sum(row.decode_tokens - row.decode_requests for row in decode)
        return (
            f"preempted: {most} of {batch} sequences, from decode step {first} on; {cache} is full,"
            f" {f'and {recomputed} tokens were recomputed' if recomputed else 'and none resumed'}"
        )
    for number, row in enumerate(decode, 1):
        if (row.decode_requests, row.decode_tokens) != (batch, batch):
            return f"decode step {number} ran {row.decode_requests} of {batch} sequences, {row.decode_tokens} tokens"
    return None
