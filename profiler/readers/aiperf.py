"""Read the exports of AIPerf and genai-perf: profile_export_aiperf.json, profile_export_genai_perf.json.

AIPerf's `concurrency` is a cap. Its `effective_decode_concurrency` is the time-averaged number of requests in decode
(docs.nvidia.com/aiperf/reference/effective-vs-active-metrics).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from profiler.errors import RequestError
from profiler.readers.figures import Figure, ForeignFile
from profiler.readers.serving import served
from profiler.readers.sources import Source
from profiler.readers.values import Record, inner, number_of, texts

_KEYS = {"request_throughput", "request_latency", "output_token_throughput"}
_SCALES = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9}
# The paths in an older AIPerf, in genai-perf, and in an older genai-perf, whose arguments are not nested.
_CONCURRENCY = (("loadgen", "concurrency"), ("perf_analyzer", "stimulus", "concurrency"), ("concurrency",))
_MODELS = (("endpoint", "model_names"), ("model_names",), ("model",))
_DECODING = "effective_decode_concurrency"
_GENAI_PERF_KEYS = ("perf_analyzer", "formatted_model_name")


def read_aiperf(source: Source) -> ForeignFile | None:
    """The figures of an export; None for another tool's file. Raises RequestError for a broken export."""
    records = source.records
    first = records[0]
    if not first.keys() >= _KEYS or not isinstance(first["request_latency"], Mapping):
        return None
    is_genai_perf = any(inner(first, "input_config", key) is not None for key in _GENAI_PERF_KEYS)
    settings = texts({"model's name": ", ".join(map(str, _models(first))), "AIPerf": first.get("aiperf_version")})
    created = str(first.get("start_time") or "")
    figures = [figure for record in records for figure in _figures(record)]
    return ForeignFile("", "genai-perf" if is_genai_perf else "AIPerf", figures, created, settings)


def _figures(record: Record) -> list[Figure]:
    if (tpot_s := _time_s(record, "inter_token_latency")) is None:
        raise RequestError(
            "it has no time between tokens, since without --streaming all tokens arrive at once; add --streaming."
        )
    return served(
        prompt_tokens=_average(record, "input_sequence_length"),
        new_tokens=_average(record, "output_sequence_length"),
        cap=_concurrency(record),
        output_per_s=_average(record, "output_token_throughput"),
        ttft_s=_time_s(record, "time_to_first_token"),
        tpot_s=tpot_s,
        decoding=_average(record, _DECODING) if inner(record, _DECODING, "avg") else None,
    )


def _models(record: Record) -> list[object]:
    items = inner(record, "input_config", "models", "items")
    if isinstance(items, list):
        return [item["name"] for item in items]
    names = _first(record, _MODELS)
    return names if isinstance(names, list) else []


def _concurrency(record: Record) -> object:
    """The concurrency of the last phase that is not excluded, as a warm-up is; without phases, that of the run."""
    phases = inner(record, "input_config", "phases")
    if isinstance(phases, list):
        measured = [phase for phase in phases if not phase.get("exclude_from_results")]
        return measured[-1].get("concurrency") if measured else None
    return _first(record, _CONCURRENCY)


def _first(record: Record, paths: Sequence[tuple[str, ...]]) -> object:
    """The first non-empty value at `paths` in the tool's configuration; None without one."""
    return next((value for path in paths if (value := inner(record, "input_config", *path))), None)


def _average(record: Record, metric: str) -> float:
    return number_of(inner(record, metric, "avg"), metric)


def _time_s(record: Record, metric: str) -> float | None:
    """The median of a time in seconds, or its mean if the file has no median; None if it was not measured."""
    value = inner(record, metric, "p50") or inner(record, metric, "avg")
    return number_of(value, metric) * _SCALES.get(str(inner(record, metric, "unit")), 1e-3) if value else None
