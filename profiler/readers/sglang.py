"""Read the results of SGLang's bench_one_batch and bench_one_batch_server: one JSON object per line and shape.

The keys are those of python/sglang/bench_one_batch.py and python/sglang/benchmark/one_batch_server.py. `acc_length` is
the server's avg_spec_accept_length: the mean number of tokens per step, including the one that every step gives
(docs.nvidia.com/nemo/automodel, speculative.bench_sglang); -1 without speculative decoding.
"""

from __future__ import annotations

from dataclasses import replace

from profiler.readers.figures import Figure, ForeignFile, told_apart
from profiler.readers.serving import speculated, step_tokens
from profiler.readers.sources import Source
from profiler.readers.values import Record, number_of, whole_of

_SHAPE = {"batch_size", "input_len", "output_len"}
_OFFLINE = {"prefill_latency"}
_SERVED = {"latency", "input_throughput", "output_throughput"}


def read_sglang(source: Source) -> ForeignFile | None:
    """The figures of a file of either; None for another tool's file. Raises RequestError for a broken file."""
    records = source.records
    keys = records[0].keys()
    if keys >= _SHAPE | _OFFLINE:
        name, figures = "SGLang bench_one_batch", _offline
    elif keys >= _SHAPE | _SERVED:
        name, figures = "SGLang bench_one_batch_server", _served
    else:
        return None
    shapes = {tuple(record[name] for name in sorted(_SHAPE)) for record in records}
    # A run's name may only name the shape, so it counts only if several records have one shape.
    names = ("run_name",) if len(shapes) < len(records) else ()
    told, shared = told_apart(records, lambda record: {item: record.get(item) for item in names}, figures)
    return ForeignFile(name, told, settings=shared)


def _prefill(record: Record, seconds: float, note: str) -> Figure:
    return Figure(
        covers="prefill",
        seconds=seconds,
        batch_size=whole_of(record["batch_size"], "batch_size", 1),
        prompt_len=whole_of(record["input_len"], "input_len", 1),
        new_tokens=whole_of(record["output_len"], "output_len", 1),
        repeats=1,
        notes=(note,),
    )


def _offline(record: Record) -> list[Figure]:
    # The tool runs each shape once, and warms up only with the first shape.
    seconds = number_of(record["prefill_latency"], "prefill_latency")
    prefill = _prefill(record, seconds, "run once; only the first shape was warmed up")
    if record.get("median_decode_latency") is None:
        return [prefill]
    step_s = number_of(record["median_decode_latency"], "median_decode_latency")
    return [prefill, replace(prefill, covers="decode", seconds=step_s, notes=("synchronised at every step",))]


def _served(record: Record) -> list[Figure]:
    """The figures of a record of bench_one_batch_server.

    Its input throughput is batch x prompt, cached tokens included, over the time until the last sequence's first token.
    The rest of the latency is that of the other tokens.
    """
    tokens = whole_of(record["batch_size"], "batch_size", 1) * whole_of(record["input_len"], "input_len", 1)
    first_s = tokens / number_of(record["input_throughput"], "input_throughput")
    prefill = _prefill(record, first_s, "until the last sequence's first token, including HTTP and the scheduler")
    whole = prefill.prompt_len or 1
    if hits := record.get("cache_hit_rate"):
        share = number_of(hits, "cache_hit_rate")
        # The last token is always computed, as it gives the first new one.
        cached = min(whole - 1, round(share * whole))
        notes = (*prefill.notes, f"{100 * share:.0f} % of the prompt came from a cache")
        prefill = replace(prefill, prompt_len=whole - cached, context_len=cached, notes=notes)
    steps = (prefill.new_tokens or 1) - 1
    rest_s = number_of(record["latency"], "latency") - first_s
    if not steps or rest_s <= 0:
        return [prefill]
    per_step = step_tokens(record.get("acc_length"))
    unsaid = record.get("acc_length") is None
    notes = ("mean of all steps, including HTTP and the scheduler", *speculated(per_step))
    seconds = rest_s / (steps / per_step)
    decode = replace(prefill, covers="decode", seconds=seconds, step_tokens=per_step, notes=notes)
    return [prefill, replace(decode, may_speculate=unsaid)]
