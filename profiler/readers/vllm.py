"""Read `vllm bench latency` and `throughput` (vllm/benchmarks/latency.py, throughput.py), without a shape.

What `latency` prints has a shape if the command is above it.
"""

from __future__ import annotations

import re

from profiler.readers.figures import Figure, ForeignFile, shared_gpus
from profiler.readers.sources import Source
from profiler.readers.values import Record, first_of, measured, number_of, whole_of

_LATENCY = {"avg_latency", "latencies", "percentiles"}
# Options of the command with their defaults. Its parser takes underscores for dashes (vllm/utils/argparse_utils.py).
_SHAPE = {
    "prompt_len": ("--input[-_]len", 32),
    "new_tokens": ("--output[-_]len", 128),
    "batch_size": ("--batch[-_]size", 8),
}
_TP, _PP = "(?:-tp|--tensor[-_]parallel[-_]size)", "(?:-pp|--pipeline[-_]parallel[-_]size)"
# A variable, or a file of options, may have any option.
_HIDDEN = re.compile(r"\$|--config\b")
_THROUGHPUT = {"elapsed_time", "num_requests", "requests_per_second", "tokens_per_second"}
_WHOLE = "prompt and generation in one figure"


def read_vllm(source: Source) -> ForeignFile | None:
    """The figures of a file of `vllm bench`; None for another tool's file. Raises RequestError for a broken file."""
    names = source.records[0].keys()
    if names >= _LATENCY:
        gpus, stages = shared_gpus(map(_gpus, source.records))
        return ForeignFile("vllm bench latency", list(map(_latency, source.records)), gpus=gpus, stages=stages)
    if names >= _THROUGHPUT:
        return ForeignFile("vllm bench throughput", [_throughput(record) for record in source.records])
    return None


def _latency(record: Record) -> Figure:
    shape: dict[str, int | None] = dict.fromkeys(_SHAPE)
    if record.get("command") is not None:
        shape = {name: _option(record, *option) for name, option in _SHAPE.items()}
    seconds = first_of(record, "percentiles.50", "avg_latency")
    figure = Figure("generate", notes=(_WHOLE,)).timed(measured(seconds, "avg_latency", values=record["latencies"]))
    return figure.with_shapes(**shape)


def _gpus(record: Record) -> tuple[int | None, int]:
    """(GPUs that shared each step, pipeline stages)."""
    return _option(record, _TP, None), _option(record, _PP, None) or 1


def _option(record: Record, option: str, default: int | None) -> int | None:
    """The value of an option of the command; None if it is no number, or may be where the text does not show it."""
    command = str(record.get("command") or "")
    given = re.findall(rf"(?<!\S){option}[\s=\\]+(\S*)", command)
    if given:
        value = given[-1].strip("'\"")
        return int(value) if value.isdecimal() else None
    return None if _HIDDEN.search(command) else default


def _throughput(record: Record) -> Figure:
    return Figure(
        covers="generate",
        seconds=number_of(record["elapsed_time"], "elapsed_time"),
        requests=whole_of(record["num_requests"], "num_requests", 1),
        repeats=1,
        notes=(_WHOLE, "its tokens/s include the prompts' tokens"),
    )
