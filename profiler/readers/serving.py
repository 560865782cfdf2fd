"""Clients of a server: `vllm bench serve` (vllm/benchmarks/serve.py) and SGLang's bench_serving.

Their `max_concurrency` is a cap: a semaphore that a request waits for (github.com/vllm-project/vllm/pull/9390). With a
`request_rate` fewer are in flight. Where tokens are speculated, vLLM tells `spec_decode_acceptance_length` and SGLang
`accept_length`: the mean of tokens a step, the one that a step always gives among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from profiler.errors import RequestError
from profiler.readers.figures import Figure, ForeignFile, apart, figures_of, number_of, texts

_KEYS = {"completed", "duration", "total_input_tokens", "total_output_tokens", "median_ttft_ms"}
_LOAD = ("request_rate", "burstiness", "max_concurrency")


def read_vllm_serving(records: Sequence[Mapping[str, Any]]) -> ForeignFile | None:
    """The figures of a serving benchmark; None where it is another's. Raises RequestError for a broken one."""
    first = records[0] if records else {}
    if not first.keys() >= _KEYS:
        return None
    name = (
        "SGLang bench_serving" if "random_input_len" in first or "sharegpt_output_len" in first else "vllm bench serve"
    )
    load, loads = apart([{name: record.get(name) for name in _LOAD} for record in records])
    figures = [
        replace(figure, settings=own) for record, own in zip(records, loads, strict=True) for figure in _figures(record)
    ]
    created = str(first.get("date") or "")
    settings = texts({"model's name": first.get("model_id"), "server": first.get("backend")})
    return ForeignFile("", name, figures_of(figures), created, {**settings, **load})


def _figures(record: Mapping[str, Any]) -> list[Figure]:
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


def step_tokens(told: object) -> float:
    """Tokens that a decode step gives each sequence; 1 where nothing is speculated, which SGLang writes as -1."""
    return 1.0 if told in (None, "", -1) else max(1.0, number_of(told, "the acceptance length"))


def _time_s(record: Mapping[str, Any], name: str) -> float | None:
    """A time in seconds; None where it was not measured, which some write as 0."""
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
    """A prefill and a decode step of a loaded server, as its client sees them.

    The sequences that decode at a time are `decoding` where the tool counted them. Else they follow from the rate and
    the time of a token (Little, Operations Research 9, 1961, 383-387), and are never more than the cap.
    """
    if cap is None and tpot_s is None:
        raise RequestError("neither a concurrency nor a time per output token is told.")
    most = math.inf if cap is None else number_of(cap, "the concurrency")
    batch = min(most, decoding or output_per_s * (tpot_s or 0.0) or most)
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
        found.append(
            replace(
                any_step,
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
    return found


def _batch_note(batch: float, most: float, decoding: float | None) -> str:
    if batch == most:
        return "batch taken for the concurrency"
    below = "" if math.isinf(most) else f", below the {most:g} that were allowed"
    return ("batch counted by the tool" if decoding else "batch estimated from rate x time per token") + below


def speculated(step_tokens: float) -> tuple[str, ...]:
    """What is to be known of a step that gives more than a token."""
    return () if step_tokens == 1 else (f"a step's time: by speculation it gives {step_tokens:.3g} tokens a sequence",)
