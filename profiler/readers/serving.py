"""Read the results of clients of a server: `vllm bench serve` (vllm/benchmarks/serve.py) and SGLang's bench_serving.

Their `max_concurrency` is a cap: a semaphore that requests wait for (github.com/vllm-project/vllm/pull/9390). With a
`request_rate` fewer are in flight. With speculative decoding, vLLM writes `spec_decode_acceptance_length` and SGLang
`accept_length`: the mean number of tokens per step, including the one that every step gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from profiler.errors import RequestError
from profiler.readers.figures import Figure, ForeignFile, Record, apart, number_of, texts, with_settings

_KEYS = {"completed", "duration", "total_input_tokens", "total_output_tokens", "median_ttft_ms"}
_LOAD = ("request_rate", "burstiness", "max_concurrency")


def read_vllm_serving(records: Sequence[Record]) -> ForeignFile | None:
    """The figures of a serving benchmark; None for another tool's file. Raises RequestError for a broken file."""
    first = records[0]
    if not first.keys() >= _KEYS:
        return None
    is_sglang = "random_input_len" in first or "sharegpt_output_len" in first
    load, loads = apart([{name: record.get(name) for name in _LOAD} for record in records])
    return ForeignFile(
        "",
        "SGLang bench_serving" if is_sglang else "vllm bench serve",
        with_settings(records, loads, _figures),
        str(first.get("date") or ""),
        {**texts({"model's name": first.get("model_id"), "server": first.get("backend")}), **load},
    )


def _figures(record: Record) -> list[Figure]:
    completed = number_of(record["completed"], "completed")
    new_tokens = number_of(record["total_output_tokens"], "total_output_tokens") / completed
    return served(
        prompt_tokens=number_of(record["total_input_tokens"], "total_input_tokens") / completed,
        new_tokens=new_tokens,
        cap=record.get("max_concurrency"),
        output_per_s=number_of(record["total_output_tokens"], "tokens") / number_of(record["duration"], "duration"),
        ttft_s=_time_s(record, "median_ttft_ms"),
        tpot_s=_time_s(record, "median_tpot_ms"),
        step_tokens=step_tokens(record.get("accept_length") or record.get("spec_decode_acceptance_length")),
    )


def step_tokens(acceptance_length: object) -> float:
    """Tokens per sequence and decode step; 1 without speculative decoding, for which SGLang writes -1."""
    without = acceptance_length in (None, "", -1)
    return 1.0 if without else max(1.0, number_of(acceptance_length, "the acceptance length"))


def _time_s(record: Record, name: str) -> float | None:
    """A time in seconds; None if it was not measured, for which some tools write 0."""
    return number_of(record[name], name) / 1e3 if record.get(name) else None


def served(
    prompt_tokens: float,
    new_tokens: float,
    cap: object,
    output_per_s: float,
    ttft_s: float | None,
    tpot_s: float | None,
    decoding: float | None = None,
    step_tokens: float = 1.0,
) -> list[Figure]:
    """The figures of a prefill and a decode step of a loaded server, as its client measures them.

    The batch of a decode step is `decoding` if the tool counted it. Otherwise it follows from the rate and the time per
    token (Little, Operations Research 9, 1961, 383-387). It is never more than the cap. Raises RequestError if there is
    neither a cap nor a time per token.
    """
    if cap is None and tpot_s is None:
        raise RequestError("it has neither a concurrency nor a time per output token.")
    most = math.inf if cap is None else number_of(cap, "the concurrency")
    batch = min(most, decoding or output_per_s * (tpot_s or 0.0) or most)
    prefill = Figure(
        covers="prefill",
        seconds=ttft_s or 0.0,
        batch_size=1,
        prompt_len=max(1, round(prompt_tokens)),
        new_tokens=max(1, round(new_tokens)),
        repeats=1,
        notes=("time to first token, including the queue, the network and other prompts", "one prompt assumed"),
    )
    figures = [prefill] if ttft_s else []
    if tpot_s:
        figures.append(
            replace(
                prefill,
                covers="decode",
                seconds=tpot_s * step_tokens,
                batch_size=max(1, round(batch)),
                cap=None if cap is None else max(1, round(most)),
                step_tokens=step_tokens,
                notes=(
                    _batch_note(batch, most, decoding),
                    "prefills of other requests may run in between",
                    *speculated(step_tokens),
                ),
            )
        )
    return figures


def _batch_note(batch: float, most: float, decoding: float | None) -> str:
    if batch == most:
        return "batch assumed to equal the concurrency"
    below = "" if math.isinf(most) else f", below the {most:g} that were allowed"
    return ("batch counted by the tool" if decoding else "batch estimated from rate x time per token") + below


def speculated(step_tokens: float) -> tuple[str, ...]:
    """A note for a step that gives more than one token per sequence."""
    return () if step_tokens == 1 else (f"time per step; speculation gives {step_tokens:.3g} tokens per sequence",)
