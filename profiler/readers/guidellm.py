"""Read GuideLLM's benchmarks.json: one benchmark per load, each with its metrics (guidellm/benchmark/schemas)."""

from __future__ import annotations

from profiler.readers.figures import Figure, ForeignFile, with_settings
from profiler.readers.serving import served
from profiler.readers.sources import Source
from profiler.readers.values import Record, apart, inner, number_of, texts


def read_guidellm(source: Source) -> ForeignFile | None:
    """The figures of a file of GuideLLM; None for another tool's file. Raises RequestError for a broken file."""
    records = source.records
    first = records[0]
    benchmarks = first.get("benchmarks")
    if (
        not isinstance(benchmarks, list)
        or not benchmarks
        or inner(benchmarks[0], "metrics", "time_to_first_token_ms") is None
    ):
        return None
    load, loads = apart([inner(benchmark, "config", "strategy") or {} for benchmark in benchmarks])
    figures = with_settings(benchmarks, loads, _figures)
    model = inner(first, "args", "model") or inner(first, "args", "backend_kwargs", "model")
    return ForeignFile("", "GuideLLM", figures, settings={**texts({"model's name": model}), **load})


def _figures(benchmark: Record) -> list[Figure]:
    metrics = benchmark["metrics"]
    tpot_ms = _figure(metrics, "inter_token_latency_ms") or _figure(metrics, "time_per_output_token_ms")
    ttft_ms = _figure(metrics, "time_to_first_token_ms")
    if not tpot_ms and not ttft_ms:
        return []
    return served(
        prompt_tokens=_figure(metrics, "prompt_token_count") or 1.0,
        new_tokens=_figure(metrics, "output_token_count") or 1.0,
        cap=inner(benchmark, "config", "strategy", "streams") or _figure(metrics, "request_concurrency", "mean"),
        output_per_s=_figure(metrics, "output_tokens_per_second", "mean") or 0.0,
        ttft_s=ttft_ms / 1e3 if ttft_ms else None,
        tpot_s=tpot_ms / 1e3 if tpot_ms else None,
    )


def _figure(metrics: Record, name: str, which: str = "median") -> float | None:
    """A statistic over the requests that succeeded; None if there is none."""
    value = inner(metrics, name, "successful", which)
    return number_of(value, name) if value else None
