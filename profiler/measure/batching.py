"""Prefill a queue's prompts in order of arrival and in other batches, alternating between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from profiler.device.clock import no_gc, time_in_turn
from profiler.engines.transformers import PaddedEngine
from profiler.facts.measurements import QueueTrial
from profiler.grid.cells import CellKey
from profiler.grid.ragged import PACKED, WAYS, Batch, as_they_come, longest
from profiler.measure.subject import Subject

# Both ways are run this often, in turn, and once before that to warm up.
_TURNS = 2
# Share of the largest logit by which sums in another order may differ in 16 bits; prompts that see each other differ by
# more.
_LOGIT_TOLERANCE = 0.05


def try_ways(subject: Subject, latencies_s: Mapping[CellKey, float], budget_s: float) -> Iterator[QueueTrial]:
    """Try each way to batch the queue of each cell of unequal prompts, the cheapest cells first, within `budget_s`.

    `latencies_s` are the measured prefills, from which the time of a trial is estimated.
    """
    ragged, machine = subject.grid.ragged, subject.machine
    if ragged is None:
        return
    deadline_s = machine.now_s() + budget_s
    cells = [cell for cell in subject.grid.cells if cell.batch_size > 1 and subject.engines[cell.engine].pads]
    for cell in cells:
        queue, batch_size = ragged.queue(cell.batch_size), cell.batch_size
        arrivals = as_they_come(queue, batch_size)
        latency_s = latencies_s.get(CellKey("prefill", cell))
        ways = {way: _padded(subject, cut(queue, batch_size)) for way, cut in WAYS.items()}
        if _packs(subject.loaded.module):
            ways[PACKED] = _packed(subject, arrivals)
        for way, run in ways.items():
            # Each turn runs two ways, and no way worth trying is slower than order of arrival.
            if latency_s is None or machine.now_s() + 2 * (1 + _TURNS) * len(arrivals) * latency_s > deadline_s:
                return
            with torch.inference_mode(), no_gc():
                both = [_padded(subject, arrivals), run]
                before, after = time_in_turn(both, machine.clock, _TURNS, drop_first=True)
            yield QueueTrial(cell, way, tuple(before), tuple(after))


def _padded(subject: Subject, batches: list[Batch]) -> Callable[[], None]:
    """A function that prefills batches one after the other, each padded to its longest prompt."""
    engine = PaddedEngine(subject.loaded.module, subject.machine)
    prompts = [(batch, _ids(subject, batch)) for batch in batches]

    def run() -> None:
        for batch, ids in prompts:
            engine.pad(batch)
            engine.prefill(ids, longest(batch))

    return run


def _packed(subject: Subject, batches: list[Batch]) -> Callable[[], None]:
    """A function that prefills each batch as one row: its prompts one after the other, with positions that restart.

    transformers separates them by `position_ids` if no cache is filled (masking_utils.py,
    `find_packed_sequence_indices`, 5.23). The prompts are scored, and no decode can follow.
    """
    model: Any = subject.loaded.module
    rows = []
    for batch in batches:
        lens = [request.prompt_len for request in batch]
        ids = torch.cat([row[-length:] for row, length in zip(_ids(subject, batch), lens, strict=True)])[None]
        positions = torch.cat([torch.arange(length) for length in lens])[None].to(subject.machine.device)
        last = (torch.tensor(lens).cumsum(0) - 1).to(subject.machine.device)
        rows.append((ids, positions, last))

    def run() -> None:
        for ids, positions, last in rows:
            model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=last)

    return run


def _packs(model: Any) -> bool:
    """Whether this model separates packed prompts: packed and unpacked, one gives the same logits."""
    ids = torch.arange(12, device=model.device)[None] % model.config.get_text_config().vocab_size
    positions = torch.tensor([[*range(4), *range(8)]], device=model.device)
    try:
        with torch.inference_mode():
            packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, -1:]
            alone = model(input_ids=ids[:, 4:], use_cache=False).logits[:, -1:]
    except (TypeError, ValueError, IndexError, RuntimeError):
        return False
    scale = float(alone.float().abs().max())
    return bool((packed.float() - alone.float()).abs().max() <= _LOGIT_TOLERANCE * scale)


def _ids(subject: Subject, batch: Batch) -> torch.Tensor:
    """The prompts of a batch, padded on the left: [batch, longest]."""
    lens = [request.prompt_len for request in batch]
    return subject.prompts.rows(lens, longest(batch), pads=True).to(subject.machine.device)
