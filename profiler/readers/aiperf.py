"""Read the exports of AIPerf and genai-perf: profile_export_aiperf.json, profile_export_genai_perf.json.

AIPerf's `concurrency` is a cap. Its `effective_decode_concurrency` is the time-averaged number of requests in decode
(docs.nvidia.com/aiperf/reference/effective-vs-active-metrics).
"""

from __future__ import annotations

from collections.abc import Mapping

from profiler.errors import RequestError
from profiler.readers.figures import Figure, ForeignFile, told_apart
from profiler.readers.serving import served
from profiler.readers.sources import Source
from profiler.readers.values import SECONDS, Record, first_of, inner, needed, number_at

_KEYS = {"request_throughput", "request_latency", "output_token_throughput"}
# The paths in an older AIPerf, in genai-perf, and in an older genai-perf, whose arguments are not nested.
_CONCURRENCY = ("loadgen.concurrency", "perf_analyzer.stimulus.concurrency", "concurrency")
_MODELS = ("endpoint.model_names", "model_names", "model")
_GENAI_PERF_KEYS = ("perf_analyzer", "formatted_model_name")


def read_aiperf(source: Source) -> ForeignFile | None:
    """The figures of an export; None for another tool's file. Raises RequestError for a broken export."""
    first = source.records[0]
    if not first.keys() >= _KEYS or not isinstance(first["request_latency"], Mapping):
        return None
    asked = first.get("input_config") or {}
    is_genai_perf = any(asked.get(key) is not None for key in _GENAI_PERF_KEYS)
    figures, settings = told_apart(source.records, _settings, _figures)
    tool = "genai-perf" if is_genai_perf else "AIPerf"
    return ForeignFile(tool, figures, str(first.get("start_time") or ""), settings)


def _settings(record: Record) -> Mapping[str, object]:
    asked = record.get("input_config") or {}
    items = inner(asked, "models.items")
    names = [item["name"] for item in items] if isinstance(items, list) else first_of(asked, *_MODELS)
    return {
        "model's name": ", ".join(map(str, names)) if isinstance(names, list) else None,
        "AIPerf": record.get("aiperf_version"),
        "concurrency": _concurrency(asked),
    }


def _figures(record: Record) -> list[Figure]:
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
