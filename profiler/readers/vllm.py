"""`vllm bench latency` and `throughput` (vllm/benchmarks/latency.py, throughput.py): JSON that names no shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from profiler.readers.figures import Figure, ForeignFile, figures_of, number_of, samples_of, whole_of

_LATENCY = {"avg_latency", "latencies", "percentiles"}
_THROUGHPUT = {"elapsed_time", "num_requests", "requests_per_second", "tokens_per_second"}


def read_vllm(records: Sequence[Mapping[str, Any]]) -> ForeignFile | None:
    """The figures of a file of `vllm bench`; None where it is another's. Raises RequestError for a broken one."""
    first = records[0] if records else {}
    if first.keys() >= _LATENCY:
        return ForeignFile("", "vllm bench latency", figures_of(_latency(record) for record in records))
    if first.keys() >= _THROUGHPUT:
        return ForeignFile("", "vllm bench throughput", figures_of(_throughput(record) for record in records))
    return None


def _latency(record: Mapping[str, Any]) -> Figure:
    samples_s = samples_of(record["latencies"], "latencies")
    return Figure(
        covers="generate",
        seconds=number_of(record["percentiles"].get("50") or record["avg_latency"], "avg_latency"),
        samples_s=samples_s,
        repeats=len(samples_s),
        notes=("prompt and generation in one figure",),
    )


def _throughput(record: Mapping[str, Any]) -> Figure:
    return Figure(
        covers="generate",
        seconds=number_of(record["elapsed_time"], "elapsed_time"),
        requests=whole_of(record["num_requests"], "num_requests", 1),
        repeats=1,
        notes=("prompt and generation in one figure", "its tokens/s count the prompts' tokens as well"),
    )
