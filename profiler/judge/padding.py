"""Batches of unequal prompts: the costs of padding, mask and waiting, and the savings of other ways to batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from profiler.facts.measurements import QueueTrial
from profiler.facts.run_facts import Facts
from profiler.grid.cells import DEFAULT_ENGINE, CellKey
from profiler.grid.ragged import REFILLING, WAYS, Batch, as_they_come, padding_share, positions, waiting
from profiler.judge.breakdown import TimeBreakdown
from profiler.judge.cells import CellResult, KeyedRecord, Lever, columns_of, or_nan
from profiler.judge.difference import is_claim, longer_s
from profiler.stats import Estimate, timing_of


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
    visits: int = 0
    """Visits with a mask or without one, whichever is fewer."""
    queue: int = 0
    """Number of prompts in the queue."""
    ways: tuple[Lever, ...] = ()
    """Savings per batch of other ways to batch the queue."""

    @property
    def mask_is_claim(self) -> bool:
        """Whether both have enough visits and the whole interval is on one side of 0."""
        low, high = self.mask_low_s, self.mask_high_s
        return low is not None and high is not None and is_claim(low, high, self.visits)


def ragged_step(
    facts: Facts, key: CellKey, parts: TimeBreakdown, steady: Mapping[CellKey, Estimate]
) -> RaggedStep | None:
    """The costs of unequal prompt lengths in a measured step; None if all lengths are equal.

    `steady` are the times without the machine's drift, which changes a step with a mask and one without alike.
    """
    batch = facts.grid.requests_of(key.cell)
    if batch is None:
        return None
    plain_key = replace(key, cell=replace(key.cell, engine=DEFAULT_ENGINE))
    mask = longer_s(steady[plain_key], steady[key]) if plain_key in steady else None
    waits = waiting(batch) if key.phase == "decode" else 0.0
    plain = facts.visits.get(plain_key.cell, ())
    operators = facts.operators[key]
    refilled = (Lever(REFILLING, waits * parts.latency_s, "every sequence of a step would still write"),)
    return RaggedStep(
        **columns_of(key),
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
        visits=min(len(plain), len(facts.visits[key.cell])),
        queue=len(facts.grid.ragged.queue(key.cell.batch_size)) if facts.grid.ragged else 0,
        ways=(
            tuple(_ways(facts, key, parts))
            if key.phase == "prefill"
            else (*_less_to_read(facts, key, parts), *(refilled if waits else ()))
        ),
    )


def with_ragged(row: CellResult, ragged: RaggedStep | None) -> CellResult:
    """The row with the costs of unequal prompts; unchanged if they are equal."""
    if ragged is None:
        return row
    waiting_s = ragged.waiting_s if row.phase == "decode" else math.nan
    return replace(row, padding=ragged.padding, mask_s=or_nan(ragged.mask_s), waiting_s=waiting_s)


def _less_to_read(facts: Facts, key: CellKey, parts: TimeBreakdown) -> Iterator[Lever]:
    """The saving of each way to batch in a decode step, which reads less padding."""
    ragged, size = facts.grid.ragged, key.cell.batch_size
    assert ragged is not None
    queue = ragged.queue(size)
    before = _padded_positions(as_they_come(queue, size))
    for way, cut in WAYS.items():
        after = _padded_positions(cut(queue, size))
        if size > 1 and before:
            because = f"each step would read {after} padded positions of a queue of {len(queue)} prompts, not {before}"
            yield Lever(way, parts.padding_s * (1 - after / before), because)


def _padded_positions(batches: Sequence[Batch]) -> int:
    """Positions of padded batches that hold no token."""
    return sum(round(positions(batch) * padding_share(batch)) for batch in batches)


def _ways(facts: Facts, key: CellKey, parts: TimeBreakdown) -> Sequence[Lever]:
    """The saving of each way to batch in a prefill: as tried on the queue, else from the number of positions."""
    cell, ragged = key.cell, facts.grid.ragged
    assert ragged is not None
    if cell.batch_size == 1:
        return []
    queue = ragged.queue(cell.batch_size)
    in_order = as_they_come(queue, cell.batch_size)
    trials = facts.queue_trials.get(cell, {})
    ways = [_tried(trial, parts.latency_s, len(queue), len(in_order)) for trial in trials.values()]
    position_s = max(0.0, parts.latency_s - parts.dispatch_s) / (cell.prompt_len * cell.batch_size)

    def seconds(batches: Sequence[Batch]) -> float:
        return sum(parts.dispatch_s + position_s * positions(batch) for batch in batches)

    for way, cut in WAYS.items():
        if way not in trials:
            batches = cut(queue, cell.batch_size)
            counts = [sum(map(positions, each)) for each in (batches, in_order)]
            because = f"{counts[0]} positions for a queue of {len(queue)} prompts instead of {counts[1]}"
            ways.append(Lever(way, (seconds(in_order) - seconds(batches)) / len(in_order), because))
    return ways


def _tried(trial: QueueTrial, latency_s: float, prompts: int, batches: int) -> Lever:
    """The saving of a tried way in one batch: the share that it saved of the whole queue."""
    before, after = timing_of(trial.as_they_come_s), timing_of(trial.this_way_s)
    share = 1 - after.median_s / before.median_s
    half_width = (after.half_width_s + before.half_width_s * (1 - share)) / before.median_s
    because = f"{prompts} prompts in {batches} batches as they come, and so, in turn"
    return Lever(trial.way, share * latency_s, because, basis="tried", half_width_s=half_width * latency_s)
