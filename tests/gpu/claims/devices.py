"""Two cards in one process: work captured for the second one runs there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from profiler.device.machine import machine_for

from .bench import Attempt, Bench, Check, NotRunError, cells_measured, within


def attempts(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("two cards in one process", _two, least_s=60.0)


def _two(bench: Bench) -> Iterator[Check]:
    if torch.cuda.device_count() < 2:
        raise NotRunError("one card is here")
    found: dict[tuple[str, int], float] = {}
    try:
        for index in (0, 1):
            one = replace(bench, device=torch.device("cuda", index))
            options = {"engine": "eager,graph", "prompt_lens": [64], "batch_sizes": [1], "budget_s": 20.0}
            run = one.run(f"card-{index}", bench.small, **options)
            decode = run.cells[run.cells["phase"] == "decode"].set_index("engine")
            yield cells_measured(f"card {index}: every cell is measured", run, list(run.answer))
            found[run.document.device.name, index] = float(decode["latency_s"].loc["graph"])
    finally:
        machine_for(bench.device)  # restore torch's current card
    (one, _), (other, _) = found
    if one != other:
        raise NotRunError(f"the cards differ: {one}, {other}")
    first_s, second_s = found.values()
    yield within("a graph's step on the second card / on the first", second_s / first_s, 0.25, [first_s, second_s])
