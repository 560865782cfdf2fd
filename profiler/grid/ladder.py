"""Default grids, each list from the largest to the smallest; a run measures the first for which it has time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from profiler.grid.cells import Grid

_RUNGS: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...] = (
    ((128, 512, 2048), (1, 4, 16), 16),
    ((128, 512, 2048), (1, 4), 16),
    ((128, 512), (1, 2, 4), 16),
    ((64, 256), (1, 2, 4), 16),
    ((64, 256), (1, 4), 10),
    ((64, 256), (1, 2), 10),
    ((64, 128), (1, 2), 10),
    ((32, 64), (1, 2), 10),
)
"""Prompt lengths, batch sizes and new tokens: what chats and retrieval look like, and less where steps are slow."""

TEST_PROMPTS = (128, 64, 32, 16)
"""Prompt lengths of a batch test; a shorter one leaves time for more doublings."""
TEST_TOKENS = 10
MOST_SEQUENCES = 4096
_WANTED = 8
"""A batch test should reach at least this batch, after three doublings."""


def default_grids(new_tokens: int | None) -> list[Grid]:
    """Return the default grids of a run, with `new_tokens` unless it is None."""
    return [Grid(prompts, sizes, new_tokens or few) for prompts, sizes, few in _RUNGS]


def doubling_grids(prompt_lens: Sequence[int], context_lens: Sequence[int], new_tokens: int | None) -> list[Grid]:
    """Return the grids of a batch test: as many doublings as possible of the first of `prompt_lens`, or of a context.

    With less time, three doublings of a shorter prompt come before fewer of a longer one.
    """
    powers = range(MOST_SEQUENCES.bit_length() - 1, 0, -1)
    sizes = [tuple(1 << power for power in range(most + 1)) for most in powers]
    enough, few = ([each for each in sizes if (each[-1] >= _WANTED) == is_enough] for is_enough in (True, False))
    grids = [Grid((prompt_len,), (), new_tokens or TEST_TOKENS) for prompt_len in prompt_lens]
    grids += [Grid((), (), new_tokens or TEST_TOKENS, (context_len,)) for context_len in context_lens]
    by_doublings = [replace(grid, batch_sizes=each) for grid in grids for each in enough]
    return by_doublings + [replace(grids[-1], batch_sizes=each) for each in few]
