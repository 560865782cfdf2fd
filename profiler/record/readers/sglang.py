"""SGLang's bench_one_batch: an object a line, a shape each (python/sglang/bench_one_batch.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from profiler.record.readers.figures import Figure, ForeignFile, number_of, whole_of

_KEYS = {"batch_size", "input_len", "output_len", "prefill_latency"}


def read(records: Sequence[Mapping[str, Any]]) -> ForeignFile | None:
    """The figures of a file of bench_one_batch; None where it is another's. Raises RequestError for a broken one."""
    if not records or not records[0].keys() >= _KEYS:
        return None
    return ForeignFile("", "SGLang bench_one_batch", tuple(figure for record in records for figure in _figures(record)))


def _figures(record: Mapping[str, Any]) -> list[Figure]:
    # The tool runs each shape once, after a warm-up with the first shape alone.
    prefill = Figure(
        covers="prefill",
        seconds=number_of(record["prefill_latency"], "prefill_latency"),
        batch_size=whole_of(record["batch_size"], "batch_size", 1),
        prompt_len=whole_of(record["input_len"], "input_len", 1),
        new_tokens=whole_of(record["output_len"], "output_len", 1),
        repeats=1,
        notes=("run once; other shapes than the first were not warmed up",),
    )
    if record.get("median_decode_latency") is None:
        return [prefill]
    step_s = number_of(record["median_decode_latency"], "median_decode_latency")
    return [prefill, replace(prefill, covers="decode", seconds=step_s, notes=("synchronised at every step",))]
