"""optimum-benchmark's benchmark.json and benchmark_report.json (optimum_benchmark/benchmark/report.py).

Its decode latency is that of the whole loop behind the first token; its decode throughput divides batch x (new tokens -
1) by that (optimum_benchmark/scenarios/inference/scenario.py, atomic_decode_volume), so that a report without its
configuration tells how many tokens the loop made, and not of how many sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from profiler.grid.cells import PHASES
from profiler.readers.figures import (
    Figure,
    ForeignFile,
    figures_of,
    inner,
    middle_s,
    number_of,
    samples_of,
    texts,
    whole_of,
)

_TOOL = "optimum-benchmark"


def read_optimum_benchmark(records: Sequence[Mapping[str, Any]]) -> ForeignFile | None:
    """The figures of a file of optimum-benchmark; None where it is another's. Raises RequestError for a broken one."""
    first = records[0] if records else {}
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
        seconds = middle_s(samples_s) if samples_s else number_of(latency.get("mean"), f"{phase}.latency")
        # Beams count as tokens in its throughput: what the configuration tells goes before that.
        loop_tokens = None if phase == "prefill" else 0 if new_tokens else _loop_tokens(report, latency)
        whole = Figure(phase, seconds, samples_s=samples_s, repeats=len(samples_s), loop_tokens=loop_tokens, **common)
        figures.append(whole.by_step())
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
    return ForeignFile("", _TOOL, figures_of(figures), settings=settings)


def _size(value: object, what: str) -> int | None:
    return None if value is None else whole_of(value, what, 1)


def _loop_tokens(report: Mapping[str, Any], latency: Mapping[str, Any]) -> int:
    """Tokens of a whole decode loop, all sequences together; 0 where no throughput is told."""
    per_s = inner(report, "decode", "throughput", "value")
    if per_s is None:
        return 0
    mean_s = number_of(latency.get("mean"), "decode.latency.mean")
    return max(1, round(number_of(per_s, "decode.throughput") * mean_s))


def _launched(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Its process launcher polls its child without a pause, on a core that the model may need."""
    polls = inner(config, "launcher", "name") == "process"
    return ("its launcher kept one core busy meanwhile",) if polls else ()
