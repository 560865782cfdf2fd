"""transformers' benchmark_v2: configurations of a model with their measurements (benchmark_v2/framework)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from profiler.grid.cells import PHASES
from profiler.readers.figures import (
    Figure,
    ForeignFile,
    apart,
    escaped,
    figures_of,
    inner,
    middle_s,
    samples_of,
    texts,
    whole_of,
)
from profiler.units import duration

_FINE = 0.01
"""A clock whose step is less of a time than this says nothing wrong of it."""
# What of a configuration is no setting: the shape, a name made of all the rest, and how long it was measured.
_SHAPE = {
    *("batch_size", "sequence_length", "num_tokens_to_generate", "name", "warmup_iterations"),
    "measurement_iterations",
}
# 2^-13 s is 0.12 ms: a finer clock is not told from chance.
_FINEST_POWER = 14


def read_transformers_benchmark(records: Sequence[Mapping[str, Any]]) -> ForeignFile | None:
    """The figures of a file of benchmark_v2; None where it is another's. Raises RequestError for a broken one.

    Such a file holds results by the hash of their configuration, each with `metadata`, `config` and `measurements`.
    """
    first_result = next(iter(records[0].values()), None) if records else None
    if not isinstance(first_result, Mapping) or inner(first_result, "measurements", "e2e_latency") is None:
        return None
    results = [item for record in records for item in record.values()]
    configs = [_config(result) for result in results]
    alike, each = apart([{name: config.get(name) for name in config if name not in _SHAPE} for config in configs])
    figures = [
        replace(figure, settings=own) for result, own in zip(results, each, strict=True) for figure in _figures(result)
    ]
    first = results[0].get("metadata") or {}
    settings = texts(
        {
            "model's name": first.get("model_id"),
            "transformers": first.get("commit_id"),
            "device": inner(first, "hardware_info", "gpu_name"),
        }
    )
    created = escaped(first.get("timestamp") or "")
    return ForeignFile("", "transformers benchmark", figures_of(figures), created, {**alike, **settings})


def _config(result: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = inner(result, "metadata", "config") or result.get("config") or {}
    return found


def _figures(result: Mapping[str, Any]) -> list[Figure]:
    measured, config = result["measurements"], _config(result)
    new_tokens = whole_of(config.get("num_tokens_to_generate"), "num_tokens_to_generate", 2)
    steps = new_tokens - 1
    # The last stamp of generate's streamer is that of its end, not of a token; a scheduler of its own has none.
    divided_by = steps if config.get("continuous_batching") else new_tokens
    first_s = samples_of(measured.get("time_to_first_token"), "time_to_first_token")
    step_s = samples_of(measured.get("inter_token_latency"), "inter_token_latency", divided_by / steps)
    clock_s = _clock_step_s(first_s)
    prefill = Figure(
        covers=PHASES[0],
        seconds=0.0,
        batch_size=whole_of(config.get("batch_size"), "batch_size", 1),
        prompt_len=whole_of(config.get("sequence_length"), "sequence_length", 1),
        new_tokens=new_tokens,
        notes=("generate's own loop: sampling, stop checks and the streamer are in it",),
    )
    put_right = (
        (f"its file divides the time of {steps} steps by {divided_by}: put right",) if divided_by > steps else ()
    )
    decode = replace(prefill, covers=PHASES[1], notes=(*put_right, *prefill.notes))
    return [
        _timed(figure, samples_s, of_clock_s)
        for figure, samples_s, of_clock_s in ((prefill, first_s, clock_s), (decode, step_s, clock_s / steps))
        if samples_s
    ]


def _timed(figure: Figure, samples_s: tuple[float, ...], clock_s: float) -> Figure:
    """A figure with its samples, or with an interval that is no narrower than a coarse clock allows."""
    timed = replace(figure, seconds=middle_s(samples_s), repeats=len(samples_s))
    if clock_s <= _FINE * timed.seconds:
        return replace(timed, samples_s=samples_s)
    half_width_s = clock_s + (max(samples_s) - min(samples_s)) / 2
    note = f"a clock that steps by {duration(clock_s)} (stamps in float32 on a machine that is long up)"
    return replace(timed, half_width_s=half_width_s, notes=(note, *timed.notes))


def _clock_step_s(samples_s: Sequence[float]) -> float:
    """The step of the clock, where it shows; 0 where it does not.

    The tool subtracts stamps of perf_counter in float32, whose steps grow with the time since the machine booted:
    7.8 ms after 18 hours, 62 ms after ten days.
    """
    for power in range(_FINEST_POWER):
        step_s = 2.0**-power
        if samples_s and all((value / step_s).is_integer() for value in samples_s):
            return step_s
    return 0.0
