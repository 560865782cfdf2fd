"""Read trtllm-bench's report, `--report_json` or printed (tensorrt_llm/bench/dataclasses/reporting.py).

Without `--streaming` only the time of the whole run is known. All requests are sent at once unless a concurrency is
given, so that a request's own latency is mostly the queue.
"""

from __future__ import annotations

import math
import re

from profiler.readers.figures import Figure, ForeignFile
from profiler.readers.serving import milliseconds, served, speculated, step_tokens
from profiler.readers.sources import Source
from profiler.readers.values import Record, first_of, inner, needed, number_at, texts, whole_of

_PER_S = "performance.request_throughput_req_s"
_OUT_PER_S = "performance.system_output_throughput_tok_s"


def read_trtllm_bench(source: Source) -> ForeignFile | None:
    """The figures of a report; None for another tool's file. Raises RequestError for a broken file."""
    report = source.records[0]
    if not inner(report, "performance.total_latency_ms") or "request_info" not in report:
        return None
    prompt, new = _lengths(source.only)
    streamed = _streamed(report, prompt, new)
    settings = {
        "model's name": inner(report, "engine.model"),
        "quantization": inner(report, "engine.quantization"),
        "TensorRT LLM": inner(report, "engine.version"),
        "tp_size": inner(report, "world_info.tp_size"),
        "device": inner(report, "machine.name"),
    }
    named = [inner(report, f"world_info.{name}") for name in ("tp_size", "pp_size")]
    gpus, stages = (whole_of(count or 1, "tp_size", 1) for count in named)
    remark = f"its requests have {prompt:.4g} tokens in and {new:.4g} out on average"
    dataset = str(inner(report, "dataset.path") or "").rpartition("/")[2]
    lengths = re.search(r"(\d+)[_x](\d+)", dataset)
    if lengths and (int(lengths[1]), int(lengths[2])) != (round(prompt), round(new)):
        remark += f", though the dataset is called {dataset}"
    return ForeignFile(
        "trtllm-bench",
        streamed or [_whole(report, prompt, new)],
        settings={name: text for name, text in texts(settings).items() if text != "None"},
        # Pipeline stages take turns in one step, and work at the same time on those of a whole run.
        gpus=(gpus if streamed else gpus * stages) if any(named) else None,
        stages=stages if streamed else 1,
        remarks=(f"{remark}.",),
    )


def _lengths(report: Record) -> tuple[float, float]:
    """(prompt tokens, new tokens) of a request on average; the rates have them, too."""
    per_s, out_per_s = needed(report, _PER_S), needed(report, _OUT_PER_S)
    new = number_at(report, "request_info.avg_output_length") or out_per_s / per_s
    prompt = number_at(report, "request_info.avg_input_length")
    return prompt or (needed(report, "performance.system_total_throughput_tok_s") - out_per_s) / per_s, new


def _streamed(report: Record, prompt: float, new: float) -> list[Figure]:
    tpot_s = milliseconds(report, "streaming_metrics.avg_tpot_ms")
    if not tpot_s:
        return []
    return served(
        prompt_tokens=prompt,
        new_tokens=new,
        cap=None,
        output_per_s=needed(report, _OUT_PER_S),
        ttft_s=milliseconds(report, "streaming_metrics.avg_ttft_ms"),
        tpot_s=tpot_s,
        requests_per_s=needed(report, _PER_S),
        acceptance=_acceptance(report),
        groups=whole_of(inner(report, "world_info.pp_size") or 1, "pp_size", 1),
    )


def _acceptance(report: Record) -> object:
    """The acceptance length, or -1: the report has a section on decoding only with speculative decoding."""
    paths = ("decoding_stats.acceptance_length", "decoding_stats.acceptance_length_percentiles.average")
    return first_of(report, *paths) or -1


def _whole(report: Record, prompt: float, new: float) -> Figure:
    seconds, per_s = needed(report, "performance.total_latency_ms") / 1e3, needed(report, _PER_S)
    latency_s = milliseconds(report, "performance.avg_request_latency_ms")
    most = number_at(report, "world_info.max_batch_size") or math.inf
    per_step = step_tokens(_acceptance(report))
    return Figure(
        covers="generate",
        seconds=seconds,
        prompt_len=max(1, round(prompt)),
        new_tokens=max(1, round(new)),
        requests=max(1, round(seconds * per_s)),
        cap=max(1, round(min(most, (latency_s or seconds) * per_s))),
        repeats=1,
        step_tokens=per_step,
        notes=("prompt and generation in one figure, without --streaming", *speculated(per_step)),
    )
