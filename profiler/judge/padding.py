"""Batches of unequal prompts: the cost of padding, mask and waiting, and what other batching saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from profiler.facts.measurements import QueueTrial
from profiler.facts.run_facts import Facts
from profiler.facts.visits import phase_samples
from profiler.grid.cells import DEFAULT_ENGINE, CellKey
from profiler.grid.ragged import REFILLING, WAYS, Batch, as_they_come, padding_share, positions, waiting
from profiler.judge.breakdown import TimeBreakdown
from profiler.judge.cells import Keyed, Lever, columns_of
from profiler.stats import CLAIM_VISITS, Estimate, VisitSpread, difference, timing_of


@dataclass(frozen=True)
class RaggedStep(Keyed):
    """What unequal lengths cost a step."""

    prompt_lens: tuple[int, ...]
    padding: float
    """Share of the batch's positions that hold no token."""
    padding_s: float
    useful_flops: float
    executed_flops: float
    waiting: float = 0.0
    """Share of the decode's steps, sequence by sequence, in which that sequence has ended."""
    waiting_s: float = 0.0
    mask_s: float | None = None
    """What the mask adds: against the same shape without one; None where that has no time."""
    mask_low_s: float | None = None
    mask_high_s: float | None = None
    visits: int = 0
    """Of the one of both that was visited less often."""
    queue: int = 0
    """Prompts that wait at once."""
    ways: tuple[Lever, ...] = ()
    """What batching the queue otherwise saves of a batch."""

    @property
    def mask_is_claim(self) -> bool:
        """Whether both were visited in turn and the whole interval lies on one side."""
        low, high = self.mask_low_s, self.mask_high_s
        return self.visits >= CLAIM_VISITS and low is not None and high is not None and low * high > 0


def ragged_step(facts: Facts, key: CellKey, parts: TimeBreakdown, spread: VisitSpread) -> RaggedStep | None:
    """What unequal lengths cost a measured step; None for a step of equal ones."""
    batch = facts.grid.requests_of(key.cell)
    if batch is None:
        return None
    mask = _mask(facts, key, spread)
    waits = waiting(batch) if key.phase == "decode" else 0.0
    plain = facts.visits.get(replace(key.cell, engine=DEFAULT_ENGINE), ())
    operators = facts.operators[key]
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
            else (*_less_to_read(facts, key, parts), *_refilled(waits * parts.latency_s))
        ),
    )


def _mask(facts: Facts, key: CellKey, spread: VisitSpread) -> Estimate | None:
    """What a step takes beyond one of the same shape without a mask, visited in turn."""
    plain = facts.visits.get(replace(key.cell, engine=DEFAULT_ENGINE))
    if not plain:
        return None
    with_mask, without = (phase_samples(key.phase, visits) for visits in (facts.visits[key.cell], plain))
    return difference(with_mask, without, spread)


def _refilled(waiting_s: float) -> tuple[Lever, ...]:
    because = "every sequence of a step would still write"
    return (Lever(REFILLING, waiting_s, because),) if waiting_s else ()


def _less_to_read(facts: Facts, key: CellKey, parts: TimeBreakdown) -> Iterator[Lever]:
    """What each way would save of a decode step: padding that no batch of it holds is not read again."""
    ragged, size = facts.grid.ragged, key.cell.batch_size
    assert ragged is not None
    queue = ragged.queue(size)
    before = _padded(as_they_come(queue, size))
    for way, cut in WAYS.items():
        after = _padded(cut(queue, size))
        if size > 1 and before:
            because = f"each step would read {after} padded positions of a queue of {len(queue)} prompts, not {before}"
            yield Lever(way, parts.padding_s * (1 - after / before), because)


def _padded(batches: Sequence[Batch]) -> int:
    """Positions of padded batches that hold nothing."""
    return sum(round(positions(batch) * padding_share(batch)) for batch in batches)


def _ways(facts: Facts, key: CellKey, parts: TimeBreakdown) -> Sequence[Lever]:
    """What each way saves of a batch's prefill: as it was tried on the queue, or else by the positions it computes."""
    cell, ragged = key.cell, facts.grid.ragged
    assert ragged is not None
    queue, size = ragged.queue(cell.batch_size), cell.batch_size
    come = as_they_come(queue, size)
    trials = facts.queue_trials.get(cell, {})
    found = [_tried(trial, parts.latency_s, len(queue), len(come)) for trial in trials.values()]
    for way, cut in WAYS.items():
        if way not in trials:
            batches = cut(queue, size)
            saves_s = _seconds(come, cell.prompt_len * size, parts) - _seconds(batches, cell.prompt_len * size, parts)
            because = (
                f"{_positions(batches)} positions for a queue of {len(queue)} prompts instead of {_positions(come)}"
            )
            found.append(Lever(way, saves_s / len(come), because))
    return [lever for lever in found if size > 1]


def _tried(trial: QueueTrial, latency_s: float, prompts: int, batches: int) -> Lever:
    """What a way that was tried saves of the batch that stands for the queue: the share that it saved of the queue."""
    before, after = timing_of(trial.as_they_come_s), timing_of(trial.this_way_s)
    share = 1 - after.median_s / before.median_s
    off = (after.half_width_s + before.half_width_s * (1 - share)) / before.median_s
    because = f"{prompts} prompts in {batches} batches as they come, and so, in turn"
    return Lever(trial.way, share * latency_s, because, basis="tried", half_width_s=off * latency_s)


def _seconds(batches: Sequence[Batch], known: int, parts: TimeBreakdown) -> float:
    """Seconds of prefills: each is dispatched, and its positions take as long as those of the one that was timed."""
    a_position_s = max(0.0, parts.latency_s - parts.dispatch_s) / known
    return sum(parts.dispatch_s + a_position_s * positions(batch) for batch in batches)


def _positions(batches: Sequence[Batch]) -> int:
    return sum(map(positions, batches))
