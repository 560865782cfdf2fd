"""Two cards in one process: what is captured for the second one runs there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from profiler.machine.machine import machine_for

from .bench import Attempt, Bench, Check, NotRunError


def attempts(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("two cards in one process", _two, least_s=60.0)


def _two(bench: Bench) -> Iterator[Check]:
    if torch.cuda.device_count() < 2:
        raise NotRunError("one card is here")
    found = {}
    try:
        for index in (0, 1):
            one = replace(bench, device=torch.device("cuda", index))
            options = {"engine": "eager,graph", "prompt_lens": [64], "batch_sizes": [1], "budget_s": 5.0}
            run = one.run(f"card-{index}", bench.small, **options)
            decode = run.cells[run.cells["phase"] == "decode"].set_index("engine")
            yield Check(f"card {index}: every cell ends", bool((run.cells["status"] == "ok").all()), list(run.answer))
            share = float(decode["bytes_per_s"].loc["graph"]) / run.document.ceilings.memory_bytes_per_s
            found[index] = {"graph_s": float(decode["latency_s"].loc["graph"]), "of the memory roof": share}
    finally:
        machine_for(bench.device)  # torch's current card again
    sane = all(0.05 < each["of the memory roof"] < 1.1 for each in found.values())
    yield Check("a graph on either card moves a model's bytes", sane, found, "0.05 .. 1.1 of the memory roof")
