"""What clients of a server write: `vllm bench serve` (vllm/benchmarks/serve.py) and SGLang's bench_serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from profiler.errors import RequestError
from profiler.record.readers.figures import Figure, ForeignFile, figures_of, number_of, texts

_KEYS = {"completed", "duration", "total_input_tokens", "total_output_tokens", "median_ttft_ms"}


def read(records: Sequence[Mapping[str, Any]]) -> ForeignFile | None:
    """The figures of a serving benchmark; None where it is another's. Raises RequestError for a broken one."""
    first = records[0] if records else {}
    if not first.keys() >= _KEYS:
        return None
    name = (
        "SGLang bench_serving" if "random_input_len" in first or "sharegpt_output_len" in first else "vllm bench serve"
    )
    figures = [figure for record in records for figure in _figures(record)]
    created = str(first.get("date") or "")
    settings = texts({"model's name": first.get("model_id"), "server": first.get("backend")})
    return ForeignFile("", name, figures_of(figures), created, settings)


def _figures(record: Mapping[str, Any]) -> list[Figure]:
    completed = number_of(record["completed"], "completed")
    new_tokens = number_of(record["total_output_tokens"], "total_output_tokens") / completed
    return served(
        prompt_tokens=number_of(record["total_input_tokens"], "total_input_tokens") / completed,
        new_tokens=new_tokens,
        concurrency=record.get("max_concurrency"),
        output_per_s=number_of(record["total_output_tokens"], "tokens") / number_of(record["duration"], "duration"),
        ttft_s=_time_s(record, "median_ttft_ms"),
        tpot_s=_time_s(record, "median_tpot_ms"),
    )


def _time_s(record: Mapping[str, Any], name: str) -> float | None:
    """A time in seconds; None where it was not measured, which some write as 0."""
    return number_of(record[name], name) / 1e3 if record.get(name) else None


def served(
    prompt_tokens: float,
    new_tokens: float,
    concurrency: object,
    output_per_s: float,
    ttft_s: float | None,
    tpot_s: float | None,
) -> list[Figure]:
    """A prefill and a decode step of a loaded server, as its client sees them.

    Where no concurrency is told, the sequences that decode at a time follow from the rate and the time of a token
    (Little, Operations Research 9, 1961, 383-387).
    """
    if concurrency is None and tpot_s is None:
        raise RequestError("neither a concurrency nor a time per output token is told.")
    told = concurrency is not None
    batch = number_of(concurrency, "the concurrency") if told else max(1.0, output_per_s * (tpot_s or 0.0))
    any_step = Figure(
        covers="prefill",
        seconds=ttft_s or 0.0,
        batch_size=1,
        prompt_len=max(1, round(prompt_tokens)),
        new_tokens=max(1, round(new_tokens)),
        repeats=1,
        notes=("time to first token: the queue, the network and other prompts are in it", "one prompt assumed"),
    )
    found = [any_step] if ttft_s else []
    if tpot_s:
        note = "batch taken for the concurrency" if told else "batch estimated from rate x time per token"
        notes = (note, "prefills of other requests may run in between")
        found.append(replace(any_step, covers="decode", seconds=tpot_s, batch_size=max(1, round(batch)), notes=notes))
    return found
