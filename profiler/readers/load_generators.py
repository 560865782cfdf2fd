"""Read the results of load generators, the clients of a server: AIPerf and genai-perf, GuideLLM, inference-perf.

- profile_export_aiperf.json and profile_export_genai_perf.json. AIPerf's `concurrency` is a cap. Its
  `effective_decode_concurrency` is the time-averaged number of requests in decode
  (docs.nvidia.com/aiperf/reference/effective-vs-active-metrics).
- GuideLLM's benchmarks.json: one benchmark per load, each with its metrics (guidellm/benchmark/schemas). Its
  `time_per_output_token_ms` includes the first token (guidellm/schemas/request_stats.py), so it is no decode step.
- inference-perf's stage_N_lifecycle_metrics.json (inference_perf/reportgen), in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from profiler.errors import RequestError
from profiler.readers.figures import Figure, ForeignFile, told_apart
from profiler.readers.serving import milliseconds, served
from profiler.readers.sources import Source
from profiler.readers.values import SECONDS, Record, first_of, inner, needed, number_at, texts

_AIPERF_KEYS = {"request_throughput", "request_latency", "output_token_throughput"}
# The paths in an older AIPerf, in genai-perf, and in an older genai-perf, whose arguments are not nested.
_CONCURRENCY = ("loadgen.concurrency", "perf_analyzer.stimulus.concurrency", "concurrency")
_MODELS = ("endpoint.model_names", "model_names", "model")
_GENAI_PERF_KEYS = ("perf_analyzer", "formatted_model_name")
_STAGE_LOAD = ("requested_rate", "concurrency")


def read_aiperf(source: Source) -> ForeignFile | None:
    """The figures of an export; None for another tool's file. Raises RequestError for a broken export."""
    first = source.records[0]
    if not first.keys() >= _AIPERF_KEYS or not isinstance(first["request_latency"], Mapping):
        return None
    asked = first.get("input_config") or {}
    is_genai_perf = any(asked.get(key) is not None for key in _GENAI_PERF_KEYS)
    figures, settings = told_apart(source.records, _export_settings, _export_figures)
    tool = "genai-perf" if is_genai_perf else "AIPerf"
    return ForeignFile(tool, figures, str(first.get("start_time") or ""), settings)


def _export_settings(record: Record) -> Mapping[str, object]:
    asked = record.get("input_config") or {}
    items = inner(asked, "models.items")
    names = [item["name"] for item in items] if isinstance(items, list) else first_of(asked, *_MODELS)
    return {
        "model's name": ", ".join(map(str, names)) if isinstance(names, list) else None,
        "AIPerf": record.get("aiperf_version"),
        "concurrency": _concurrency(asked),
    }


def _export_figures(record: Record) -> list[Figure]:
    if (tpot_s := _time_s(record, "inter_token_latency")) is None:
        raise RequestError(
            "it has no time between tokens, since without --streaming all tokens arrive at once; add --streaming."
        )
    return served(
        prompt_tokens=needed(record, "input_sequence_length.avg"),
        new_tokens=needed(record, "output_sequence_length.avg"),
        cap=_concurrency(record.get("input_config") or {}),
        output_per_s=needed(record, "output_token_throughput.avg"),
        ttft_s=_time_s(record, "time_to_first_token"),
        tpot_s=tpot_s,
        mean_tpot_s=_time_s(record, "inter_token_latency", "avg"),
        decoding=number_at(record, "effective_decode_concurrency.avg"),
    )


def _concurrency(asked: Record) -> object:
    """The concurrency of the last phase that is not excluded, as a warm-up is; without phases, that of the run."""
    phases = asked.get("phases")
    if isinstance(phases, list):
        measured = [phase for phase in phases if not phase.get("exclude_from_results")]
        return measured[-1].get("concurrency") if measured else None
    return first_of(asked, *_CONCURRENCY)


def _time_s(record: Record, metric: str, *statistics: str) -> float | None:
    """A time in seconds: the first of `statistics` that the file has, by default the median, else the mean."""
    value = number_at(record, *(f"{metric}.{statistic}" for statistic in statistics or ("p50", "avg")))
    return value * SECONDS.get(str(inner(record, f"{metric}.unit")), 1e-3) if value else None


def read_guidellm(source: Source) -> ForeignFile | None:
    """The figures of a file of GuideLLM; None for another tool's file. Raises RequestError for a broken file."""
    first = source.records[0]
    benchmarks = first.get("benchmarks")
    if not isinstance(benchmarks, list) or not benchmarks or not inner(benchmarks[0], "metrics.time_to_first_token_ms"):
        return None
    figures, load = told_apart(benchmarks, lambda each: inner(each, "config.strategy") or {}, _benchmark_figures)
    settings = texts({"model's name": first_of(source.only, "args.model", "args.backend_kwargs.model")})
    return ForeignFile("GuideLLM", figures, settings={**settings, **load})


def _benchmark_figures(benchmark: Record) -> list[Figure]:
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


def read_inference_perf(source: Source) -> ForeignFile | None:
    """The figures of a report; None for another tool's file. Raises RequestError for a broken file."""
    if not all("load_summary" in record and "successes" in record for record in source.records):
        return None
    figures, load = told_apart(
        source.records, lambda report: {name: report["load_summary"].get(name) for name in _STAGE_LOAD}, _stage_figures
    )
    return ForeignFile("inference-perf", figures, settings=load)


def _stage_figures(report: Record) -> list[Figure]:
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
