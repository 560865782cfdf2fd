"""SGLang's bench_one_batch and bench_one_batch_server: one object per line, one shape each.

The keys are those of python/sglang/bench_one_batch.py and python/sglang/benchmark/one_batch_server.py. `acc_length` is
the server's avg_spec_accept_length: the mean of tokens a step where they are speculated, the one that a step always
gives among them (docs.nvidia.com/nemo/automodel, speculative.bench_sglang); -1 where they are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from profiler.readers.figures import Figure, ForeignFile, Settings, apart, figures_of, number_of, whole_of
from profiler.readers.serving import speculated, step_tokens

_SHAPE = {"batch_size", "input_len", "output_len"}
_ALONE = {"prefill_latency"}
_SERVED = {"latency", "input_throughput", "output_throughput"}


def read_sglang(records: Sequence[Mapping[str, Any]]) -> ForeignFile | None:
    """The figures of a file of either; None where it is another's. Raises RequestError for a broken one."""
    keys = records[0].keys() if records else set()
    if keys >= _SHAPE | _ALONE:
        name, figures = "SGLang bench_one_batch", _alone
    elif keys >= _SHAPE | _SERVED:
        name, figures = "SGLang bench_one_batch_server", _served
    else:
        return None
    settings, each = _names(records)
    found = [
        replace(figure, settings=own) for record, own in zip(records, each, strict=True) for figure in figures(record)
    ]
    return ForeignFile("", name, figures_of(found), settings=settings)


def _names(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], list[Settings]]:
    """Names of runs tell apart what has one shape; elsewhere they may name the shape itself."""
    shapes = [tuple(record[name] for name in sorted(_SHAPE)) for record in records]
    if len(set(shapes)) == len(shapes):
        return {}, [()] * len(records)
    return apart([{"run_name": record.get("run_name")} for record in records])


def _prefill(record: Mapping[str, Any], seconds: float, note: str) -> Figure:
    return Figure(
        covers="prefill",
        seconds=seconds,
        batch_size=whole_of(record["batch_size"], "batch_size", 1),
        prompt_len=whole_of(record["input_len"], "input_len", 1),
        new_tokens=whole_of(record["output_len"], "output_len", 1),
        repeats=1,
        notes=(note,),
    )


def _alone(record: Mapping[str, Any]) -> list[Figure]:
    # The tool runs each shape once, after a warm-up with the first shape alone.
    seconds = number_of(record["prefill_latency"], "prefill_latency")
    prefill = _prefill(record, seconds, "run once; other shapes than the first were not warmed up")
    if record.get("median_decode_latency") is None:
        return [prefill]
    step_s = number_of(record["median_decode_latency"], "median_decode_latency")
    return [prefill, replace(prefill, covers="decode", seconds=step_s, notes=("synchronised at every step",))]


def _served(record: Mapping[str, Any]) -> list[Figure]:
    """Through a server: its input throughput is batch x prompt over the time until the last sequence's first token, and
    what is left of the latency is the other tokens'."""
    tokens = whole_of(record["batch_size"], "batch_size", 1) * whole_of(record["input_len"], "input_len", 1)
    first_s = tokens / number_of(record["input_throughput"], "input_throughput")
    prefill = _prefill(record, first_s, "until the last sequence's first token; HTTP and the scheduler are in it")
    if hits := record.get("cache_hit_rate"):
        share = number_of(hits, "cache_hit_rate")
        prefill = replace(prefill, notes=(*prefill.notes, f"{100 * share:.0f} % of the prompt came from a cache"))
    steps = (prefill.new_tokens or 1) - 1
    left_s = number_of(record["latency"], "latency") - first_s
    if not steps or left_s <= 0:
        return [prefill]
    per_step = step_tokens(record.get("acc_length"))
    notes = ("the mean of all steps; HTTP and the scheduler are in it", *speculated(per_step))
    seconds = left_s / (steps / per_step)
    return [prefill, replace(prefill, covers="decode", seconds=seconds, step_tokens=per_step, notes=notes)]
