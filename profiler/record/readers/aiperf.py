"""AIPerf's and genai-perf's exports: profile_export_aiperf.json, profile_export_genai_perf.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from profiler.record.readers.figures import Figure, ForeignFile, inner, number_of, texts
from profiler.record.readers.serving import served

_KEYS = {"request_throughput", "request_latency", "output_token_throughput"}
_SCALES = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9}
# AIPerf's own way of telling it, and genai-perf's.
_CONCURRENCY = (("loadgen", "concurrency"), ("perf_analyzer", "stimulus", "concurrency"))


def read(records: Sequence[Mapping[str, Any]]) -> ForeignFile | None:
    """The figures of an export; None where it is another's. Raises RequestError for a broken one."""
    first = records[0] if records else {}
    if not first.keys() >= _KEYS or not isinstance(first["request_latency"], Mapping):
        return None
    tool = "genai-perf" if inner(first, "input_config", "perf_analyzer") is not None else "AIPerf"
    models = inner(first, "input_config", "endpoint", "model_names") or inner(first, "input_config", "model_names")
    settings = texts({"model's name": ", ".join(map(str, models)) if isinstance(models, list) else None})
    created = str(first.get("start_time") or "")
    return ForeignFile("", tool, tuple(figure for record in records for figure in _figures(record)), created, settings)


def _figures(record: Mapping[str, Any]) -> list[Figure]:
    concurrency = next((found for path in _CONCURRENCY if (found := inner(record, "input_config", *path))), None)
    return served(
        prompt_tokens=_average(record, "input_sequence_length"),
        new_tokens=_average(record, "output_sequence_length"),
        concurrency=concurrency,
        output_per_s=_average(record, "output_token_throughput"),
        ttft_s=_time_s(record, "time_to_first_token"),
        tpot_s=_time_s(record, "inter_token_latency"),
    )


def _average(record: Mapping[str, Any], metric: str) -> float:
    return number_of(inner(record, metric, "avg"), metric)


def _time_s(record: Mapping[str, Any], metric: str) -> float | None:
    """A time's median in seconds, or its mean where no median is told; None where it was not measured."""
    value = inner(record, metric, "p50") or inner(record, metric, "avg")
    return number_of(value, metric) * _SCALES.get(str(inner(record, metric, "unit")), 1e-3) if value else None
