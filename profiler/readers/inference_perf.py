"""Read the reports of inference-perf: stage_N_lifecycle_metrics.json (inference_perf/reportgen), in seconds."""

from __future__ import annotations

from profiler.errors import RequestError
from profiler.readers.figures import Figure, ForeignFile, told_apart
from profiler.readers.serving import served
from profiler.readers.sources import Source
from profiler.readers.values import Record, inner, needed, number_at

_LOAD = ("requested_rate", "concurrency")


def read_inference_perf(source: Source) -> ForeignFile | None:
    """The figures of a report; None for another tool's file. Raises RequestError for a broken file."""
    if not all("load_summary" in record and "successes" in record for record in source.records):
        return None
    figures, load = told_apart(
        source.records, lambda report: {name: report["load_summary"].get(name) for name in _LOAD}, _figures
    )
    return ForeignFile("inference-perf", figures, settings=load)


def _figures(report: Record) -> list[Figure]:
    found = report["successes"]
    ttft, tpot = "latency.time_to_first_token", "latency.time_per_output_token"
    if not inner(found, f"{tpot}.mean"):
        raise RequestError(
            "it has no time between tokens; measure with `streaming: true` in the tool's `api` settings."
        )
    return served(
        prompt_tokens=needed(found, "prompt_len.mean"),
        new_tokens=needed(found, "output_len.mean"),
        cap=inner(report, "load_summary.concurrency"),
        output_per_s=needed(found, "throughput.output_tokens_per_sec"),
        ttft_s=number_at(found, f"{ttft}.median", f"{ttft}.mean"),
        tpot_s=number_at(found, f"{tpot}.median", f"{tpot}.mean"),
        mean_ttft_s=number_at(found, f"{ttft}.mean"),
        mean_tpot_s=number_at(found, f"{tpot}.mean"),
        requests_per_s=needed(found, "throughput.requests_per_sec"),
    )
