"""Prompts of unequal lengths: their notation, their order, and the batches cut from them."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from profiler.errors import GridError

PADDED_ENGINE = "padded"
"""The engine that steps a batch of unequal prompts as transformers does: padded on the left, with a mask."""
RAGGED = "ragged:"
QUEUE_BATCHES = 4
"""Requests that wait at once, in batches: among so many a server may choose what to batch together."""
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")
_LINE = re.compile(r"(\d{1,9})(?:[,;\s]+(\d{1,9}))?")
_SEED = 0
_MOST_LINES = 100_000
_GRAMMAR = (
    "use ragged:32..512 (drawn evenly, seeded), or ragged:FILE with a prompt's length on each line, and behind a comma"
    " the tokens that it writes where they differ"
)


@dataclass(frozen=True, order=True)
class Request:
    """One prompt, by its length alone."""

    prompt_len: int
    new_tokens: int
    """Tokens that it writes before it ends."""


Batch = tuple[Request, ...]


@dataclass(frozen=True)
class Ragged:
    """Requests of unequal lengths, in the order in which they come."""

    name: str
    """`32..512`, or the own name of the file that they were read from."""
    requests: tuple[Request, ...]

    def batches(self, size: int) -> list[Batch]:
        """Whole batches of so many, as they come; what is left over at the end fills none."""
        return [self.requests[at : at + size] for at in range(0, len(self.requests) - size + 1, size)]

    def middle(self, size: int) -> int:
        """The number of the batch that stands for the others: the median one by its share of padding."""
        batches = self.batches(size)
        ranked = sorted(range(len(batches)), key=lambda number: (padding_share(batches[number]), number))
        return ranked[(len(ranked) - 1) // 2]

    def batch(self, size: int) -> Batch:
        """The batch that stands for the others."""
        return self.batches(size)[self.middle(size)]

    def queue(self, size: int) -> Batch:
        """Requests that wait beside those of `batch`, and those: four batches, or as many as there are."""
        batches = self.batches(size)
        first = min(max(0, self.middle(size) - 1), max(0, len(batches) - QUEUE_BATCHES))
        return tuple(request for batch in batches[first : first + QUEUE_BATCHES] for request in batch)


def longest(batch: Batch) -> int:
    """Positions that each prompt of a batch is padded to."""
    return max(request.prompt_len for request in batch)


def positions(batch: Batch) -> int:
    """Positions that a padded batch has, filled or not."""
    return len(batch) * longest(batch)


def padding_share(batch: Batch) -> float:
    """Share of a padded batch's positions that hold nothing."""
    return 1 - sum(request.prompt_len for request in batch) / positions(batch)


def waiting(batch: Batch) -> float:
    """Share of a batch's decode steps, sequence by sequence, in which that sequence has ended before: the batch goes on
    until its last one ends, and the first token of each comes from the prompt."""
    steps = [request.new_tokens - 1 for request in batch]
    return 1 - sum(steps) / (len(steps) * max(steps))


def as_they_come(queue: Sequence[Request], size: int) -> list[Batch]:
    """The requests in their order, in batches of so many; the last one may be smaller."""
    return [tuple(queue[at : at + size]) for at in range(0, len(queue), size)]


def sorted_batches(queue: Batch, size: int) -> list[Batch]:
    """Sort requests by length, then cut batches of `size`."""
    return as_they_come(sorted(queue), size)


def bucketed_batches(queue: Batch, size: int) -> list[Batch]:
    """Batches of one bucket each: requests whose lengths end at the same power of two, as they come."""
    buckets: dict[int, list[Request]] = {}
    for request in queue:
        buckets.setdefault(math.ceil(math.log2(request.prompt_len)), []).append(request)
    return [batch for _, members in sorted(buckets.items()) for batch in as_they_come(members, size)]


def parse_ragged(text: str, largest_batch: int, new_tokens: int) -> Ragged:
    """`ragged:32..512` as four of the largest batches of lengths, drawn evenly with a seed; `ragged:FILE` as its lines.

    Raises GridError for what is neither, and for a file that cannot be read or does not fill the largest batch.
    """
    name = text.removeprefix(RAGGED)
    if match := _RANGE.fullmatch(name):
        low, high = int(match[1]), int(match[2])
        if not 1 <= low <= high:
            raise GridError(f"--prompt-lens: {text!r} does not run upwards from 1 or more; {_GRAMMAR}.")
        # random() gives the same numbers in every version of Python; randint need not.
        draw = random.Random(_SEED)
        drawn = (low + int(draw.random() * (high - low + 1)) for _ in range(QUEUE_BATCHES * largest_batch))
        return Ragged(name, tuple(Request(length, new_tokens) for length in drawn))
    requests = _read(Path(name), text, new_tokens)
    if len(requests) < largest_batch:
        raise GridError(f"--prompt-lens: {name} has {len(requests)} lengths, which fill no batch of {largest_batch}.")
    return Ragged(Path(name).name, requests)


def _read(path: Path, text: str, new_tokens: int) -> tuple[Request, ...]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        raise GridError(f"--prompt-lens: {text!r} is no range and no file that can be read; {_GRAMMAR}.") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or int(match[1]) < 1 or (match[2] and int(match[2]) < 1):
            raise GridError(f"--prompt-lens: line {number} of {path.name} is no length of 1 or more; {_GRAMMAR}.")
        found.append(Request(int(match[1]), int(match[2] or new_tokens)))
    if len(found) > _MOST_LINES:
        raise GridError(f"--prompt-lens: {path.name} has more than {_MOST_LINES} lengths.")
    return tuple(found)


SORTED, BUCKETED, PACKED = "sorting by length", "bucketing by length", "packing prompts into one row"
WAYS: Mapping[str, Callable[[Batch, int], list[Batch]]] = {SORTED: sorted_batches, BUCKETED: bucketed_batches}
"""Ways to cut a queue into batches that are padded still; packing pads nothing."""
REFILLING = "filling the place of a sequence that has ended (continuous batching)"
