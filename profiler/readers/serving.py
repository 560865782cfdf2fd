"""Read the results of clients of a server: `vllm bench serve` and `sweep` (vllm/benchmarks), SGLang's bench_serving.

Their `max_concurrency` is a cap: a semaphore that requests wait for (github.com/vllm-project/vllm/pull/9390). With a
`request_rate` fewer are in flight. With speculative decoding, vLLM writes `spec_decode_acceptance_length` and SGLang
`accept_length`: the mean number of tokens per step, including the one that every step gives. A step processes vLLM's
drafts and one token more; SGLang's `speculative_num_draft_tokens` include that token. `vllm bench sweep` adds its
parameters and a `run_number` to the record of each run (sweep/serve.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from profiler.readers.figures import Figure, ForeignFile, shared_gpus, told_apart
from profiler.readers.sources import Source
from profiler.readers.values import Record, first_of, inner, needed, number_at, number_of, whole_of

_KEYS = {"completed", "duration", "total_input_tokens", "total_output_tokens", "median_ttft_ms"}
_LOAD = ("request_rate", "burstiness", "max_concurrency")
# Keys of a record of `vllm bench serve` that are not parameters of a sweep.
_RESULTS = re.compile(
    r"(mean|median|std|p[\d.]+)_(ttft|tpot|itl|e2el)_ms|(total|spec_decode)_.*|max_(output_tokens_per_s"
    r"|concurrent_requests)"
    r"|.*(_throughput|_lens|_goodput|_id|_type)|date|backend|label|num_prompts|completed|failed|duration|ramp_up.*"
    r"|latencies|queue_times|start_times|ttfts|itls|generated_texts|errors|rtfx|run_number|"
)
_TP = ("server_info.tp_size", "tensor_parallel_size", "tensor-parallel-size", "tp")
_DP = ("server_info.dp_size", "data_parallel_size", "data-parallel-size", "dp")
_PP = ("server_info.pp_size", "pipeline_parallel_size", "pipeline-parallel-size", "pp")
# Tokens that arrive together, from which on a step gives several or the server sends them in chunks.
_CHUNKED = 1.5


def read_serving(source: Source) -> ForeignFile | None:
    """The figures of a serving benchmark; None for another tool's file. Raises RequestError for a broken file."""
    first = source.records[0]
    if not first.keys() >= _KEYS:
        return None
    is_sweep = "run_number" in first
    is_sglang = not is_sweep and ("random_input_len" in first or "sharegpt_output_len" in first)
    figures, settings = told_apart(source.records, _settings, _figures)
    gpus, stages = shared_gpus(map(_gpus, source.records))
    return ForeignFile(
        "SGLang bench_serving" if is_sglang else f"vllm bench {'sweep' if is_sweep else 'serve'}",
        _repeated(figures) if is_sweep else figures,
        str(first.get("date") or ""),
        settings,
        gpus,
        stages,
        remarks=(
            *([_PINNED] if is_sglang and any(map(_is_pinned, source.records)) else []),
            *([_SHARED] if is_sweep and any(_replicas(record) > 1 for record in source.records) else []),
        ),
    )


# docs.vllm.ai, serving/data_parallel_deployment: expert layers form a group of all replicas' GPUs.
_SHARED = "with data parallelism vLLM shares a mixture's experts among all replicas: the floor of a mixture is lower."
_PINNED = "its tokens repeat, as with a pinned acceptance length: the tokens per step say nothing about real texts."


def _is_pinned(record: Record) -> bool:
    """Whether the texts have far fewer tokens than were generated, while the drafts were accepted."""
    again = number_at(record, "total_output_tokens_retokenized") if record.get("accept_length") else None
    return again is not None and again < needed(record, "total_output_tokens") / 2


def _settings(record: Record) -> Mapping[str, object]:
    """The server, and what was asked of it; of a sweep, its parameters, too."""
    swept = [name for name in record if name not in _LOAD and not _RESULTS.fullmatch(name)]
    return {
        "model's name": record.get("model_id"),
        "server": record.get("backend"),
        "tp_size": first_of(record, *_TP),
        **{name: inner(record, f"server_info.{name}") for name in ("pp_size", "dp_size", "quantization")},
        "draft tokens": inner(record, "server_info.speculative_num_draft_tokens"),
        **{name: record.get(name) for name in (*_LOAD, *(swept if "run_number" in record else ()))},
    }


def _gpus(record: Record) -> tuple[int | None, int]:
    """(GPUs that shared each step, pipeline stages)."""
    gpus, stages = first_of(record, *_TP), first_of(record, *_PP)
    return whole_of(gpus, "tp_size", 1) if gpus else None, whole_of(stages or 1, "pp_size", 1)


def _repeated(figures: Sequence[Figure]) -> list[Figure]:
    """One figure for all runs of a sweep that have the same parameters, with a repetition for each."""
    runs: dict[tuple[object, ...], list[Figure]] = {}
    for figure in figures:
        runs.setdefault((figure.covers, figure.settings), []).append(figure)
    return [
        replace(same[0], seconds=median(samples), samples_s=samples, repeats=len(samples))
        for same in runs.values()
        for samples in [tuple(figure.seconds for figure in same)]
    ]


def _replicas(record: Record) -> int:
    """Copies of the model that share the requests; with `enable_dp_attention` all GPUs of `tp_size` have one model."""
    return (
        1 if inner(record, "server_info.enable_dp_attention") else whole_of(first_of(record, *_DP) or 1, "dp_size", 1)
    )


def _figures(record: Record) -> list[Figure]:
    completed, duration_s = needed(record, "completed"), needed(record, "duration")
    output_tokens = needed(record, "total_output_tokens")
    acceptance = first_of(record, "accept_length", "spec_decode_acceptance_length")
    server = record.get("server_info") or {}
    if acceptance is None and server.get("speculative_algorithm") is None and "speculative_algorithm" in server:
        # A server whose settings have the algorithm, but without a value, does not speculate.
        acceptance = -1
    drafted = number_at(server, "speculative_num_draft_tokens")
    if drafts := number_at(record, "spec_decode_num_drafts"):
        drafted = 1 + needed(record, "spec_decode_draft_tokens") / drafts
    return served(
        prompt_tokens=needed(record, "total_input_tokens") / completed,
        new_tokens=output_tokens / completed,
        cap=first_of(record, "max_concurrency"),
        output_per_s=output_tokens / duration_s,
        ttft_s=milliseconds(record, "median_ttft_ms", "mean_ttft_ms"),
        tpot_s=milliseconds(record, "median_tpot_ms", "mean_tpot_ms"),
        mean_ttft_s=milliseconds(record, "mean_ttft_ms"),
        mean_tpot_s=milliseconds(record, "mean_tpot_ms"),
        itl_s=milliseconds(record, "median_itl_ms", "mean_itl_ms"),
        requests_per_s=completed / duration_s,
        acceptance=acceptance,
        verified=drafted,
        groups=_replicas(record) * _gpus(record)[1],
    )


def step_tokens(acceptance_length: object) -> float:
    """Tokens per sequence and decode step; 1 without speculative decoding, for which SGLang writes -1."""
    without = acceptance_length in (None, "", -1)
    return 1.0 if without else max(1.0, number_of(acceptance_length, "the acceptance length"))


def milliseconds(record: Record, *paths: str) -> float | None:
    """Seconds of the first time in milliseconds at one of `paths`; None if none was measured."""
    value = number_at(record, *paths)
    return value / 1e3 if value else None


def served(
    *,
    prompt_tokens: float,
    new_tokens: float,
    cap: object,
    output_per_s: float,
    ttft_s: float | None,
    tpot_s: float | None,
    mean_ttft_s: float | None = None,
    mean_tpot_s: float | None = None,
    itl_s: float | None = None,
    requests_per_s: float = 0.0,
    decoding: float | None = None,
    acceptance: object = None,
    verified: float | None = None,
    groups: int = 1,
) -> list[Figure]:
    """The figures of a prefill and a decode step of a loaded server, as its client measures them.

    The batch of a decode step is `decoding` if the tool counted it. Otherwise it follows from the rate and the mean
    time per token (Little, Operations Research 9, 1961, 383-387), and so does the number of requests that wait for
    their first token; without a mean, from the median. It is never more than the cap. `acceptance` is the file's
    acceptance length, `verified` the tokens per sequence that a step processes. `groups` of GPUs, replicas or pipeline
    stages, have a batch each at a time.
    """
    most = math.inf if cap is None else number_of(cap, "the concurrency")
    batch = min(most, decoding or output_per_s * (mean_tpot_s or tpot_s or 0.0) or most)
    per_step = step_tokens(acceptance)
    waiting = round(requests_per_s * (mean_ttft_s or ttft_s or 0.0))
    prefill = Figure(
        covers="prefill",
        seconds=ttft_s or 0.0,
        batch_size=1,
        prompt_len=max(1, round(prompt_tokens)),
        new_tokens=max(1, round(new_tokens)),
        repeats=1,
        notes=(
            "time to first token, including the queue, the network and other prompts",
            "one prompt assumed",
            *([f"queueing: {waiting} requests wait for their first token at a time"] if waiting > 1 else []),
        ),
    )
    figures = [prefill] if ttft_s else []
    if tpot_s:
        chunk, of_group = (itl_s or 0.0) / tpot_s, max(1, round(batch / groups))
        notes = [_batch_note(batch, most, decoding)]
        if of_group < round(batch):
            notes.append(f"divided by {groups}, as so many replicas or pipeline stages have a batch each")
        if most > 1:
            notes.append("prefills of other requests may run in between")
        if acceptance is None and chunk > _CHUNKED:
            notes.append(f"tokens arrive about {chunk:.2g} at a time: a step may give several, or the server chunks")
        figures.append(
            replace(
                prefill,
                covers="decode",
                seconds=tpot_s * per_step,
                batch_size=of_group,
                cap=None if cap is None else max(1, round(most)),
                step_tokens=per_step,
                verified_tokens=verified if per_step > 1 else None,
                may_speculate=acceptance is None,
                notes=(*notes, *speculated(per_step, verified)),
            )
        )
    return figures


def _batch_note(batch: float, most: float, decoding: float | None) -> str:
    if round(batch) >= most:
        return "batch assumed to equal the concurrency"
    below = "" if math.isinf(most) else f", below the {most:g} that were allowed"
    return ("batch counted by the tool" if decoding else "batch estimated from rate x time per token") + below


def speculated(step_tokens: float, verified: float | None = None) -> tuple[str, ...]:
    """A note for a step that gives more than one token per sequence."""
    if step_tokens == 1:
        return ()
    processed = f"processes {verified:.3g}" if verified else "those it drafts in vain are not counted"
    return (f"a decode step gives {step_tokens:.3g} tokens per sequence by speculation, and {processed}",)
