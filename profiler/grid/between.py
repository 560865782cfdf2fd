"""Steps that no cell of a grid takes, of numbers of rows between those of its cells."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import pairwise

from profiler.grid import Cell, CellKey


def keys_between(keys: Collection[CellKey]) -> tuple[CellKey, ...]:
    """Steps that fill the gaps between the rows (tokens) of `keys`: each number doubled until it comes near the next.

    Fewer rows than any prompt has are a decode step of so many sequences, more are one prompt; each engine gets its
    own.
    """
    prompts = [key.tokens for key in keys if key.phase == "prefill"]
    shortest = min(prompts, default=math.inf)
    least: dict[str, Cell] = {}
    for key in keys:
        least[key.cell.engine] = min(key.cell, least.get(key.cell.engine, key.cell))
    found = []
    for rows in _doubled(sorted({key.tokens for key in keys})):
        for cell in least.values():
            if rows < shortest:
                found.append(CellKey("decode", replace(cell, batch_size=rows)))
            else:
                found.append(CellKey("prefill", replace(cell, batch_size=1, prompt_len=rows, context_len=0)))
    return tuple(found)


def _doubled(ascending: list[int]) -> Iterator[int]:
    for below, above in pairwise(ascending):
        rows = 2 * below
        while rows * math.sqrt(2) <= above:
            yield rows
            rows *= 2
