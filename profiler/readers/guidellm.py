"""Read GuideLLM's benchmarks.json: one benchmark per load, each with its metrics (guidellm/benchmark/schemas).

Its `time_per_output_token_ms` includes the first token (guidellm/schemas/request_stats.py), so it is no decode step.
"""

from __future__ import annotations

from profiler.readers.figures import Figure, ForeignFile, told_apart
from profiler.readers.serving import milliseconds, served
from profiler.readers.sources import Source
from profiler.readers.values import Record, first_of, inner, needed, number_at, texts


def read_guidellm(source: Source) -> ForeignFile | None:
    """The figures of a file of GuideLLM; None for another tool's file. Raises RequestError for a broken file."""
    first = source.records[0]
    benchmarks = first.get("benchmarks")
    if not isinstance(benchmarks, list) or not benchmarks or not inner(benchmarks[0], "metrics.time_to_first_token_ms"):
        return None
    figures, load = told_apart(benchmarks, lambda benchmark: inner(benchmark, "config.strategy") or {}, _figures)
    settings = texts({"model's name": first_of(source.only, "args.model", "args.backend_kwargs.model")})
    return ForeignFile("GuideLLM", figures, settings={**settings, **load})


def _figures(benchmark: Record) -> list[Figure]:
    """The figures of the requests that succeeded."""
    tpot_s = milliseconds(benchmark, _median("inter_token_latency_ms"))
    ttft_s = milliseconds(benchmark, _median("time_to_first_token_ms"))
    if not tpot_s and not ttft_s:
        return []
    return served(
        prompt_tokens=needed(benchmark, _median("prompt_token_count")),
        new_tokens=needed(benchmark, _median("output_token_count")),
        cap=first_of(benchmark, "config.strategy.streams", "metrics.request_concurrency.successful.mean"),
        output_per_s=number_at(benchmark, "metrics.output_tokens_per_second.successful.mean") or 0.0,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        mean_tpot_s=milliseconds(benchmark, "metrics.inter_token_latency_ms.successful.mean"),
    )


def _median(metric: str) -> str:
    return f"metrics.{metric}.successful.median"
