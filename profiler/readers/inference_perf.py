"""Read the reports of inference-perf: stage_N_lifecycle_metrics.json (inference_perf/reportgen), in seconds."""

from __future__ import annotations

from profiler.errors import RequestError
from profiler.readers.figures import Figure, ForeignFile, with_settings
from profiler.readers.serving import served
from profiler.readers.sources import Source
from profiler.readers.values import Record, apart, inner, number_of

_LOAD = ("requested_rate", "concurrency")


def read_inference_perf(source: Source) -> ForeignFile | None:
    """The figures of a report; None for another tool's file. Raises RequestError for a broken file."""
    if not all("load_summary" in record and "successes" in record for record in source.records):
        return None
    load, loads = apart([{name: inner(record, "load_summary", name) for name in _LOAD} for record in source.records])
    figures = with_settings(source.records, loads, _figures)
    return ForeignFile("", "inference-perf", figures, settings=load)


def _figures(report: Record) -> list[Figure]:
    if not inner(report, "successes", "latency", "time_per_output_token", "mean"):
        raise RequestError(
            "it has no time between tokens; measure with `streaming: true` in the tool's `api` settings."
        )
    return served(
        prompt_tokens=number_of(inner(report, "successes", "prompt_len", "mean"), "prompt_len"),
        new_tokens=number_of(inner(report, "successes", "output_len", "mean"), "output_len"),
        cap=inner(report, "load_summary", "concurrency"),
        output_per_s=number_of(
            inner(report, "successes", "throughput", "output_tokens_per_sec"), "output_tokens_per_sec"
        ),
        ttft_s=_time_s(report, "time_to_first_token"),
        tpot_s=_time_s(report, "time_per_output_token"),
        requests_per_s=number_of(inner(report, "successes", "throughput", "requests_per_sec"), "requests_per_sec"),
    )


def _time_s(report: Record, name: str) -> float | None:
    times = inner(report, "successes", "latency", name) or {}
    value = times.get("median") or times.get("mean")
    return number_of(value, name) if value else None
