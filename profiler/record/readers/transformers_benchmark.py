"""transformers' own benchmark_v2: a model's configurations, each with its measurements (benchmark_v2/framework)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from profiler.grid import PHASES
from profiler.record.readers.figures import (
    Figure,
    ForeignFile,
    inner,
    middle_s,
    number_of,
    samples_of,
    shown,
    texts,
    whole_of,
)


def read(records: Sequence[Mapping[str, Any]]) -> ForeignFile | None:
    """The figures of a file of benchmark_v2; None where it is another's. Raises RequestError for a broken one.

    Such a file holds results by the hash of their configuration, each with `metadata`, `config` and `measurements`.
    """
    first_result = next(iter(records[0].values()), None) if records else None
    if not isinstance(first_result, Mapping) or inner(first_result, "measurements", "e2e_latency") is None:
        return None
    results = [item for record in records for item in record.values()]
    figures = [figure for result in results for figure in _figures(result)]
    first = results[0].get("metadata") or {}
    settings = texts({"transformers": first.get("commit_id"), "device": inner(first, "hardware_info", "gpu_name")})
    return ForeignFile("", "transformers benchmark", tuple(figures), shown(first.get("timestamp") or ""), settings)


def _figures(result: Mapping[str, Any]) -> list[Figure]:
    measured, config = result["measurements"], inner(result, "metadata", "config") or result.get("config") or {}
    found = []
    for phase, name in ((PHASES[0], "time_to_first_token"), (PHASES[1], "inter_token_latency")):
        samples_s = samples_of(measured.get(name), name) or _told(measured, name)
        if samples_s:
            figure = Figure(
                covers=phase,
                seconds=middle_s(samples_s),
                batch_size=whole_of(config.get("batch_size"), "batch_size", 1),
                prompt_len=whole_of(config.get("sequence_length"), "sequence_length", 1),
                new_tokens=whole_of(config.get("num_tokens_to_generate"), "num_tokens_to_generate", 1),
                samples_s=samples_s,
                repeats=len(samples_s),
                notes=("generate's own loop: sampling, stop checks and the streamer are in it",),
            )
            found.append(figure)
    return found


def _told(measured: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """Times told with their statistics beside them."""
    values = inner(measured, name, "measurements")
    if values is not None:
        return samples_of(values, name)
    median = inner(measured, name, "median")
    return (number_of(median, name),) if median is not None else ()
