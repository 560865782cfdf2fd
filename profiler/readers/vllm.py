"""Read `vllm bench latency` and `throughput` (vllm/benchmarks/latency.py, throughput.py), JSON without a shape."""

from __future__ import annotations

from collections.abc import Sequence

from profiler.readers.figures import Figure, ForeignFile, Record, figures_of, number_of, samples_of, whole_of

_LATENCY = {"avg_latency", "latencies", "percentiles"}
_THROUGHPUT = {"elapsed_time", "num_requests", "requests_per_second", "tokens_per_second"}


def read_vllm(records: Sequence[Record]) -> ForeignFile | None:
    """The figures of a file of `vllm bench`; None for another tool's file. Raises RequestError for a broken file."""
    first = records[0]
    if first.keys() >= _LATENCY:
        return ForeignFile("", "vllm bench latency", figures_of(_latency(record) for record in records))
    if first.keys() >= _THROUGHPUT:
        return ForeignFile("", "vllm bench throughput", figures_of(_throughput(record) for record in records))
    return None


def _latency(record: Record) -> Figure:
    samples_s = samples_of(record["latencies"], "latencies")
    return Figure(
        covers="generate",
        seconds=number_of(record["percentiles"].get("50") or record["avg_latency"], "avg_latency"),
        samples_s=samples_s,
        repeats=len(samples_s),
        notes=("prompt and generation in one figure",),
    )


def _throughput(record: Record) -> Figure:
    return Figure(
        covers="generate",
        seconds=number_of(record["elapsed_time"], "elapsed_time"),
        requests=whole_of(record["num_requests"], "num_requests", 1),
        repeats=1,
        notes=("prompt and generation in one figure", "its tokens/s include the prompts' tokens"),
    )
