"""AIPerf's and genai-perf's exports: profile_export_aiperf.json, profile_export_genai_perf.json.

AIPerf's `concurrency` is a cap, too; its `effective_decode_concurrency` is how many requests were in their decode, on
average over the benchmark's time (docs.nvidia.com/aiperf/reference/effective-vs-active-metrics).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from profiler.errors import RequestError
from profiler.readers.figures import Figure, ForeignFile, figures_of, inner, number_of, texts
from profiler.readers.serving import served

_KEYS = {"request_throughput", "request_latency", "output_token_throughput"}
_SCALES = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9}
# An older AIPerf's way of telling it, genai-perf's, and an older genai-perf's, which lists its arguments flat.
_CONCURRENCY = (("loadgen", "concurrency"), ("perf_analyzer", "stimulus", "concurrency"), ("concurrency",))
_MODELS = (("endpoint", "model_names"), ("model_names",), ("model",))
_DECODING = "effective_decode_concurrency"
_OF_GENAI_PERF = ("perf_analyzer", "formatted_model_name")


def read_aiperf(records: Sequence[Mapping[str, Any]]) -> ForeignFile | None:
    """The figures of an export; None where it is another's. Raises RequestError for a broken one."""
    first = records[0] if records else {}
    if not first.keys() >= _KEYS or not isinstance(first["request_latency"], Mapping):
        return None
    of_genai_perf = any(inner(first, "input_config", key) is not None for key in _OF_GENAI_PERF)
    tool = "genai-perf" if of_genai_perf else "AIPerf"
    settings = texts({"model's name": ", ".join(map(str, _models(first))), "AIPerf": first.get("aiperf_version")})
    created = str(first.get("start_time") or "")
    figures = figures_of(figure for record in records for figure in _figures(record))
    return ForeignFile("", tool, figures, created, settings)


def _figures(record: Mapping[str, Any]) -> list[Figure]:
    if (tpot_s := _time_s(record, "inter_token_latency")) is None:
        raise RequestError("no time between tokens is told: without --streaming the first token comes with the last.")
    return served(
        prompt_tokens=_average(record, "input_sequence_length"),
        new_tokens=_average(record, "output_sequence_length"),
        cap=_concurrency(record),
        output_per_s=_average(record, "output_token_throughput"),
        ttft_s=_time_s(record, "time_to_first_token"),
        tpot_s=tpot_s,
        decoding=_average(record, _DECODING) if inner(record, _DECODING, "avg") else None,
    )


def _models(record: Mapping[str, Any]) -> list[object]:
    items = inner(record, "input_config", "models", "items")
    if isinstance(items, list):
        return [item["name"] for item in items]
    found = _first(record, _MODELS)
    return found if isinstance(found, list) else []


def _concurrency(record: Mapping[str, Any]) -> object:
    """Requests at a time, where phases are told those of the last that counts: a warm-up is one of its own."""
    phases = inner(record, "input_config", "phases")
    if isinstance(phases, list):
        measured = [phase for phase in phases if not phase.get("exclude_from_results")]
        return measured[-1].get("concurrency") if measured else None
    return _first(record, _CONCURRENCY)


def _first(record: Mapping[str, Any], paths: Sequence[tuple[str, ...]]) -> object:
    """What the first of some places in the tool's own configuration holds; None where none does."""
    return next((found for path in paths if (found := inner(record, "input_config", *path))), None)


def _average(record: Mapping[str, Any], metric: str) -> float:
    return number_of(inner(record, metric, "avg"), metric)


def _time_s(record: Mapping[str, Any], metric: str) -> float | None:
    """A time's median in seconds, or its mean where no median is told; None where it was not measured."""
    value = inner(record, metric, "p50") or inner(record, metric, "avg")
    return number_of(value, metric) * _SCALES.get(str(inner(record, metric, "unit")), 1e-3) if value else None
