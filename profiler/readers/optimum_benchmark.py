"""Read optimum-benchmark's benchmark.json and benchmark_report.json (optimum_benchmark/benchmark/report.py).

Its decode latency is that of the whole loop after the first token. Its decode throughput is batch x (new tokens - 1)
divided by that latency (optimum_benchmark/scenarios/inference/scenario.py, atomic_decode_volume). A report without its
configuration therefore gives the tokens of the loop, but not the number of sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from profiler.grid.cells import PHASES
from profiler.readers.figures import Figure, ForeignFile
from profiler.readers.sources import Source
from profiler.readers.values import inner, number_of, samples_of, texts, whole_of

_TOOL = "optimum-benchmark"


def read_optimum_benchmark(source: Source) -> ForeignFile | None:
    """The figures of a file of optimum-benchmark; None for another tool's file. Raises RequestError if it is broken."""
    records = source.records
    first = records[0]
    report, config = (first["report"], first.get("config") or {}) if "report" in first else (first, {})
    if not isinstance(report, Mapping) or not any(inner(report, name, "latency") for name in ("prefill", "decode")):
        return None
    shapes = inner(config, "scenario", "input_shapes") or {}
    generate = inner(config, "scenario", "generate_kwargs") or {}
    new_tokens = _size(generate.get("max_new_tokens"), "max_new_tokens")
    common: dict[str, Any] = {
        "batch_size": _size(shapes.get("batch_size"), "batch_size"),
        "prompt_len": _size(shapes.get("sequence_length"), "sequence_length"),
        "new_tokens": new_tokens,
        "notes": _launched(config),
    }
    figures = []
    for phase in PHASES:
        latency = inner(report, phase, "latency")
        if latency is None:
            continue
        samples_s = samples_of(latency.get("values"), f"{phase}.latency.values")
        seconds = median(samples_s) if samples_s else number_of(latency.get("mean"), f"{phase}.latency")
        # The configuration takes precedence, since the throughput counts beams as tokens.
        loop_tokens = None if phase == "prefill" else 0 if new_tokens else _loop_tokens(report, latency)
        figure = Figure(phase, seconds, samples_s=samples_s, repeats=len(samples_s), loop_tokens=loop_tokens, **common)
        figures.append(figure.by_step())
    settings = texts(
        {
            "model's name": inner(config, "backend", "model"),
            "precision": inner(config, "backend", "torch_dtype"),
            "attention": inner(config, "backend", "attn_implementation"),
            "device": inner(config, "environment", "gpu") or inner(config, "environment", "cpu"),
            "transformers": inner(config, "environment", "transformers_version"),
            "optimum-benchmark": inner(config, "environment", "optimum_benchmark_version"),
        }
    )
    return ForeignFile("", _TOOL, figures, settings=settings)


def _size(value: object, what: str) -> int | None:
    return None if value is None else whole_of(value, what, 1)


def _loop_tokens(report: Mapping[str, Any], latency: Mapping[str, Any]) -> int:
    """Tokens of all sequences in a whole decode loop; 0 if the file has no throughput."""
    per_s = inner(report, "decode", "throughput", "value")
    if per_s is None:
        return 0
    mean_s = number_of(latency.get("mean"), "decode.latency.mean")
    return max(1, round(number_of(per_s, "decode.throughput") * mean_s))


def _launched(config: Mapping[str, Any]) -> tuple[str, ...]:
    """A note if the launcher is `process`, which polls its child without a pause on a core the model may need."""
    polls = inner(config, "launcher", "name") == "process"
    return ("its launcher kept one core busy during the measurement",) if polls else ()
