"""Read the results of transformers' benchmark_v2: measurements by configuration (benchmark_v2/framework)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from profiler.grid.cells import PHASES
from profiler.readers.figures import Figure, ForeignFile, told_apart
from profiler.readers.sources import Source
from profiler.readers.values import Record, escaped, inner, number_of, texts, whole_of
from profiler.units import duration

_FINE = 0.01
"""A clock is fine enough if its step is at most this share of the time."""
# Keys of a configuration that are not settings: the shape, a name made of all other keys, and the repetitions.
_SHAPE = {
    *("batch_size", "sequence_length", "num_tokens_to_generate", "name", "warmup_iterations"),
    "measurement_iterations",
}
# The finest step that is looked for is 2^-13 s = 0.12 ms; a finer one cannot be distinguished from chance.
_FINEST_POWER = 14


def read_transformers_benchmark(source: Source) -> ForeignFile | None:
    """The figures of a file of benchmark_v2; None for another tool's file. Raises RequestError for a broken file.

    The file maps the hash of a configuration to a result with `metadata`, `config` and `measurements`.
    """
    records = source.records
    first_result = next(iter(records[0].values()), None)
    if not isinstance(first_result, Mapping) or inner(first_result, "measurements.e2e_latency") is None:
        return None
    results = [item for record in records for item in record.values()]
    figures, shared = told_apart(
        results, lambda each: {name: value for name, value in _config(each).items() if name not in _SHAPE}, _figures
    )
    first = results[0].get("metadata") or {}
    settings = texts(
        {
            "model's name": first.get("model_id"),
            "transformers": first.get("commit_id"),
            "device": inner(first, "hardware_info.gpu_name"),
        }
    )
    created = escaped(first.get("timestamp") or "")
    return ForeignFile("transformers benchmark", figures, created, {**shared, **settings})


def _config(result: Record) -> Mapping[str, Any]:
    config: Mapping[str, Any] = inner(result, "metadata.config") or result.get("config") or {}
    return config


def _figures(result: Record) -> list[Figure]:
    measurements, config = result["measurements"], _config(result)
    new_tokens = whole_of(config.get("num_tokens_to_generate"), "num_tokens_to_generate", 2)
    steps = new_tokens - 1
    # The streamer of `generate` adds a last stamp at its end, which is not a token's; continuous batching does not.
    divisor = steps if config.get("continuous_batching") else new_tokens
    first_s, step_s = (
        tuple(scale * number_of(value, name) for value in measurements.get(name) or ())
        for name, scale in (("time_to_first_token", 1.0), ("inter_token_latency", divisor / steps))
    )
    clock_s = _clock_step_s(first_s)
    prefill = Figure(
        covers=PHASES[0],
        batch_size=whole_of(config.get("batch_size"), "batch_size", 1),
        prompt_len=whole_of(config.get("sequence_length"), "sequence_length", 1),
        new_tokens=new_tokens,
        notes=("the loop of `generate`, including sampling, stop checks and the streamer",),
    )
    correction = (f"its file divides the time of {steps} steps by {divisor}: corrected",) if divisor > steps else ()
    decode = replace(prefill, covers=PHASES[1], notes=(*correction, *prefill.notes))
    return [
        _timed(figure, samples_s, resolution_s)
        for figure, samples_s, resolution_s in ((prefill, first_s, clock_s), (decode, step_s, clock_s / steps))
        if samples_s
    ]


def _timed(figure: Figure, samples_s: tuple[float, ...], clock_s: float) -> Figure:
    """The figure with its samples, or with an interval that includes the step of a coarse clock."""
    timed = replace(figure, seconds=median(samples_s), repeats=len(samples_s))
    if clock_s <= _FINE * timed.seconds:
        return replace(timed, samples_s=samples_s)
    half_width_s = clock_s + (max(samples_s) - min(samples_s)) / 2
    note = f"a clock that steps by {duration(clock_s)} (float32 timestamps on a machine with a long uptime)"
    return replace(timed, half_width_s=half_width_s, notes=(note, *timed.notes))


def _clock_step_s(samples_s: Sequence[float]) -> float:
    """The step of the clock in seconds; 0 if it is too fine to be seen.

    The tool subtracts float32 values of perf_counter, whose resolution gets coarser with the time since boot: 7.8 ms
    after 18 hours, 62 ms after ten days.
    """
    for power in range(_FINEST_POWER):
        step_s = 2.0**-power
        if samples_s and all((value / step_s).is_integer() for value in samples_s):
            return step_s
    return 0.0
