"""Read `vllm bench latency` and `throughput` (vllm/benchmarks/latency.py, throughput.py), without a shape.

What `latency` prints has a shape if the command is above it.
"""

from __future__ import annotations

import re

from profiler.readers.figures import Figure, ForeignFile
from profiler.readers.sources import Source
from profiler.readers.values import Record, first_of, measured, number_of, whole_of

_LATENCY = {"avg_latency", "latencies", "percentiles"}
# Options of the command with their defaults.
_SHAPE = {"prompt_len": ("input-len", 32), "new_tokens": ("output-len", 128), "batch_size": ("batch-size", 8)}
_THROUGHPUT = {"elapsed_time", "num_requests", "requests_per_second", "tokens_per_second"}
_WHOLE = "prompt and generation in one figure"


def read_vllm(source: Source) -> ForeignFile | None:
    """The figures of a file of `vllm bench`; None for another tool's file. Raises RequestError for a broken file."""
    names = source.records[0].keys()
    if names >= _LATENCY:
        return ForeignFile("vllm bench latency", [_latency(record) for record in source.records])
    if names >= _THROUGHPUT:
        return ForeignFile("vllm bench throughput", [_throughput(record) for record in source.records])
    return None


def _latency(record: Record) -> Figure:
    shape: dict[str, int | None] = dict.fromkeys(_SHAPE)
    if record.get("command") is not None:
        for name, (option, default) in _SHAPE.items():
            given = re.search(rf"--{option}[ =]+(\d+)", str(record["command"]))
            shape[name] = int(given[1]) if given else default
    seconds = first_of(record, "percentiles.50", "avg_latency")
    figure = Figure("generate", notes=(_WHOLE,)).timed(measured(seconds, "avg_latency", values=record["latencies"]))
    return figure.with_shapes(**shape)


def _throughput(record: Record) -> Figure:
    return Figure(
        covers="generate",
        seconds=number_of(record["elapsed_time"], "elapsed_time"),
        requests=whole_of(record["num_requests"], "num_requests", 1),
        repeats=1,
        notes=(_WHOLE, "its tokens/s include the prompts' tokens"),
    )
