"""Prompts of unequal lengths: their notation, and the batches that they form in their order."""

import random
import re
from dataclasses import dataclass
from pathlib import Path

from profiler.errors import GridError
from profiler.units import several

PADDED_ENGINE = "padded"
"""The engine that steps a batch of unequal prompts like transformers: padded on the left, with a mask."""
RAGGED = "ragged:"
_GRAMMAR = (
    "use ragged:32..512 (drawn evenly, seeded), or ragged:FILE with a prompt's length on each line, and after a comma"
    " its number of new tokens if they differ"
)


@dataclass(frozen=True)
class Request:
    """One prompt, by its length."""

    prompt_len: int
    new_tokens: int
    """Tokens that it writes before it ends."""


Batch = tuple[Request, ...]


@dataclass(frozen=True)
class Ragged:
    """Requests of unequal lengths, in the order of their arrival."""

    name: str
    """`32..512`, or the name of the file without its folder."""
    requests: tuple[Request, ...]

    def batch(self, size: int) -> Batch:
        """Return the representative batch of `size` in order of arrival: the median by its share of padding."""
        starts = range(0, len(self.requests) - size + 1, size)  # a smaller rest at the end is left out
        ranked = sorted((self.requests[at : at + size] for at in starts), key=padding_share)
        return ranked[(len(ranked) - 1) // 2]


def longest(batch: Batch) -> int:
    """Return the length in tokens to which each prompt of a batch is padded."""
    return max(request.prompt_len for request in batch)


def padding_share(batch: Batch) -> float:
    """Return the share of a padded batch's positions that are padding."""
    return 1 - sum(request.prompt_len for request in batch) / (len(batch) * longest(batch))


def waiting(batch: Batch) -> float:
    """Return the share of a batch's decode steps, until the last sequence ends, in which one has already ended."""
    steps = [request.new_tokens - 1 for request in batch]
    return 1 - sum(steps) / (len(steps) * max(steps))


def parse_ragged(text: str, largest_batch: int, new_tokens: int) -> Ragged:
    """Return the requests of `ragged:32..512` (seeded) or `ragged:FILE` (one a line). Raises GridError."""
    name = text.removeprefix(RAGGED)
    if match := re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", name):
        low, high = int(match[1]), int(match[2])
        if not 1 <= low <= high:
            raise GridError(f"--prompt-lens: {text!r} is not an ascending range from 1 or more; {_GRAMMAR}.")
        # random() gives the same numbers in every version of Python; randint need not.
        source = random.Random(0)
        # Four batches of the largest size, of which the one with the median padding is measured.
        lengths = (low + int(source.random() * (high - low + 1)) for _ in range(4 * largest_batch))
        return Ragged(name, tuple(Request(length, new_tokens) for length in lengths))
    try:
        lines = [line.strip() for line in Path(name).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        raise GridError(f"--prompt-lens: {text!r} is neither a range nor a readable file; {_GRAMMAR}.") from None
    file, requests = Path(name).name, []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"(\d{1,9})(?:[,;\s]+(\d{1,9}))?", line)
        if match is None or int(match[1]) < 1 or (match[2] and int(match[2]) < 1):
            raise GridError(f"--prompt-lens: line {number} of {file} is not a length of 1 or more; {_GRAMMAR}.")
        requests.append(Request(int(match[1]), int(match[2] or new_tokens)))
    return Ragged(file, tuple(requests))


def too_few(name: str | None, prompts: int, batch: int) -> str:
    """Return the error of a file whose prompts do not fill a batch."""
    return (
        f"{name} has {several(prompts, 'prompt', 'prompts')}, too few for a batch of {batch}; use --batch-sizes"
        f" {prompts} or less."
    )
