"""Read trtllm-bench's report, `--report_json` or printed (tensorrt_llm/bench/dataclasses/reporting.py).

Without `--streaming` only the time of the whole run is known. All requests are sent at once unless a concurrency is
given, so that a request's own latency is mostly the queue.
"""

from __future__ import annotations

import math
import re

from profiler.readers.figures import Figure, ForeignFile
from profiler.readers.serving import served
from profiler.readers.sources import Source
from profiler.readers.values import Record, inner, number_of, texts, whole_of


def read_trtllm_bench(source: Source) -> ForeignFile | None:
    """The figures of a report; None for another tool's file. Raises RequestError for a broken file."""
    report = source.records[0]
    if not inner(report, "performance", "total_latency_ms") or "request_info" not in report:
        return None
    prompt, new = _lengths(report)
    figures = _streamed(report, prompt, new) or [_whole(report, prompt, new)]
    settings = {
        "model's name": inner(report, "engine", "model"),
        "quantization": inner(report, "engine", "quantization"),
        "TensorRT LLM": inner(report, "engine", "version"),
        "tp_size": inner(report, "world_info", "tp_size"),
        "device": inner(report, "machine", "name"),
    }
    gpus = [inner(report, "world_info", name) for name in ("tp_size", "pp_size")]
    remark = f"its requests have {prompt:.4g} tokens in and {new:.4g} out on average"
    dataset = str(inner(report, "dataset", "path") or "").rpartition("/")[2]
    named = re.search(r"(\d+)[_x](\d+)", dataset)
    if named and (int(named[1]), int(named[2])) != (round(prompt), round(new)):
        remark += f", though the dataset is called {dataset}"
    return ForeignFile(
        "",
        "trtllm-bench",
        figures,
        settings={name: text for name, text in texts(settings).items() if text != "None"},
        gpus=math.prod(whole_of(count or 1, "tp_size", 1) for count in gpus) if any(gpus) else None,
        remarks=(f"{remark}.",),
    )


def _lengths(report: Record) -> tuple[float, float]:
    """(prompt tokens, new tokens) of a request on average; the rates have them, too."""
    info, rates = report["request_info"], report["performance"]
    per_s = number_of(rates.get("request_throughput_req_s"), "request_throughput_req_s")
    out_per_s = number_of(rates.get("system_output_throughput_tok_s"), "system_output_throughput_tok_s")
    new = number_of(info.get("avg_output_length") or out_per_s / per_s, "avg_output_length")
    prompt = info.get("avg_input_length")
    if not prompt:
        total = number_of(rates.get("system_total_throughput_tok_s"), "system_total_throughput_tok_s")
        prompt = (total - out_per_s) / per_s
    return number_of(prompt, "avg_input_length"), new


def _streamed(report: Record, prompt: float, new: float) -> list[Figure]:
    times, rates = report.get("streaming_metrics") or {}, report["performance"]
    if not times.get("avg_tpot_ms"):
        return []
    accepted = inner(report, "decoding_stats", "acceptance_length") or inner(
        report, "decoding_stats", "acceptance_length_percentiles", "average"
    )
    return served(
        prompt_tokens=prompt,
        new_tokens=new,
        cap=None,
        output_per_s=number_of(rates["system_output_throughput_tok_s"], "system_output_throughput_tok_s"),
        ttft_s=number_of(times["avg_ttft_ms"], "avg_ttft_ms") / 1e3 if times.get("avg_ttft_ms") else None,
        tpot_s=number_of(times["avg_tpot_ms"], "avg_tpot_ms") / 1e3,
        requests_per_s=number_of(rates["request_throughput_req_s"], "request_throughput_req_s"),
        # The report has a section on decoding only with speculative decoding.
        acceptance=accepted or -1,
    )


def _whole(report: Record, prompt: float, new: float) -> Figure:
    rates = report["performance"]
    seconds = number_of(rates["total_latency_ms"], "total_latency_ms") / 1e3
    per_s = number_of(rates["request_throughput_req_s"], "request_throughput_req_s")
    latency_ms = rates.get("avg_request_latency_ms")
    in_flight = number_of(latency_ms, "avg_request_latency_ms") / 1e3 * per_s if latency_ms else seconds * per_s
    most = inner(report, "world_info", "max_batch_size")
    if most:
        in_flight = min(in_flight, number_of(most, "max_batch_size"))
    return Figure(
        covers="generate",
        seconds=seconds,
        prompt_len=max(1, round(prompt)),
        new_tokens=max(1, round(new)),
        requests=max(1, round(seconds * per_s)),
        cap=max(1, round(in_flight)),
        repeats=1,
        notes=("prompt and generation in one figure, without --streaming",),
    )
