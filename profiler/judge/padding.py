"""Batches of unequal prompts: the costs of padding, its mask, and waiting."""

from collections.abc import Mapping
from dataclasses import dataclass

from profiler.facts.run_facts import Facts
from profiler.grid.cells import DEFAULT_ENGINE, CellKey, KeyedRecord
from profiler.grid.ragged import padding_share, waiting
from profiler.judge.breakdown import TimeBreakdown
from profiler.judge.difference import longer_s
from profiler.stats import Estimate


@dataclass(frozen=True)
class RaggedStep(KeyedRecord):
    """The costs of unequal prompt lengths in a step."""

    prompt_lens: tuple[int, ...]
    padding: float
    """Share of the batch's positions that hold no token."""
    padding_s: float
    useful_flops: float
    executed_flops: float
    waiting: float = 0.0
    """Share of all decode steps of all sequences in which the sequence has already ended."""
    waiting_s: float = 0.0
    mask_s: float | None = None
    """Time that the mask adds to the same shape without a mask; None if that was not measured."""
    mask_low_s: float | None = None
    mask_high_s: float | None = None
    repetitions: int = 0
    """Repetitions with a mask or without one, whichever is fewer."""


def ragged_step(
    facts: Facts, key: CellKey, parts: TimeBreakdown, steady: Mapping[CellKey, Estimate]
) -> RaggedStep | None:
    """The costs of unequal prompt lengths in a measured step; None if all lengths are equal.

    `steady` are the times without the machine's drift, which changes a step with a mask and one without alike.
    """
    batch = facts.grid.requests_of(key.cell)
    if batch is None:
        return None
    plain_key = key.on(DEFAULT_ENGINE)
    mask = longer_s(steady[plain_key], steady[key]) if plain_key in steady else None
    waits = waiting(batch) if key.phase == "decode" else 0.0
    operators = facts.operators[key]
    return RaggedStep(
        **key.columns,
        prompt_lens=tuple(request.prompt_len for request in batch),
        padding=padding_share(batch),
        padding_s=parts.padding_s,
        useful_flops=float(sum(item.flops for item in operators)),
        executed_flops=float(sum(item.executed_flops for item in operators)),
        waiting=waits,
        waiting_s=waits * parts.latency_s,
        mask_s=mask.median_s if mask else None,
        mask_low_s=mask.low_s if mask else None,
        mask_high_s=mask.high_s if mask else None,
        repetitions=min(len(facts.repetitions.get(plain_key.cell, ())), len(facts.repetitions[key.cell])),
    )
