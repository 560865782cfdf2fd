"""Read what tools print at their end, as the records that they write with an option for JSON.

Labels are those of vllm/benchmarks/serve.py and latency.py, of SGLang's bench_serving.py, and of TensorRT-LLM's
tensorrt_llm/bench/dataclasses/reporting.py, in their versions since 2024.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from profiler.readers.values import Record

_SERVING = re.compile(r"=+ Serving Benchmark Result =+")
_END = re.compile(r"^.*={20,}\s*$", re.MULTILINE)
_TRTLLM = re.compile(r"= PERFORMANCE OVERVIEW\s*\n.*={20,}")
_LATENCY = re.compile(r"Avg latency: +(?P<mean>[\d.e-]+) seconds(?P<rest>(?:\s+(?:Std|\d+% percentile) latency: .*)*)")
_PERCENTILE = re.compile(r"(\d+)% percentile latency: +([\d.e-]+)")
# Options of the command with their defaults. Its parser takes underscores for dashes (vllm/utils/argparse_utils.py).
_OPTIONS = {
    "input_len": ("--input[-_]len", "32"),
    "output_len": ("--output[-_]len", "128"),
    "batch_size": ("--batch[-_]size", "8"),
    "tp": ("(?:-tp|--tensor[-_]parallel[-_]size)", None),
    "pp": ("(?:-pp|--pipeline[-_]parallel[-_]size)", None),
}
# A variable, or a file of options, may have any option.
_HIDDEN = re.compile(r"\$|--config\b")
_COMMAND = re.compile(r"(?:bench latency|benchmark_latency\.py)(?P<options>(?:[^\n\\]|\\\s*\n)*)")
_SERVING_KEYS = {
    "Backend": "backend",
    "Successful requests": "completed",
    "Benchmark duration (s)": "duration",
    "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens",
    "Maximum request concurrency": "max_concurrency",
    "Max request concurrency": "max_concurrency",
    "Request rate configured (RPS)": "request_rate",
    "Traffic request rate": "request_rate",
    "Acceptance length": "spec_decode_acceptance_length",
    "Accept length": "accept_length",
    "Drafts": "spec_decode_num_drafts",
    "Draft tokens": "spec_decode_draft_tokens",
    **{
        f"{which} {name} (ms)": f"{which.lower()}_{name.lower()}_ms"
        for which in ("Mean", "Median")
        for name in ("TTFT", "TPOT", "ITL")
    },
}
_SERVING_NEEDED = ("completed", "duration", "total_input_tokens", "total_output_tokens", "median_ttft_ms")
# Paths of keys in the JSON report.
_TRTLLM_KEYS = {
    "Model": "engine.model",
    "Quantization": "engine.quantization",
    "TensorRT LLM Version": "engine.version",
    "TP Size": "world_info.tp_size",
    "PP Size": "world_info.pp_size",
    "Average Input Length (tokens)": "request_info.avg_input_length",
    "Average Output Length (tokens)": "request_info.avg_output_length",
    "Request Throughput (req/sec)": "performance.request_throughput_req_s",
    "Total Output Throughput (tokens/sec)": "performance.system_output_throughput_tok_s",
    "Token Throughput (tokens/sec)": "performance.system_output_throughput_tok_s",
    "Total Token Throughput (tokens/sec)": "performance.system_total_throughput_tok_s",
    "Total Latency (ms)": "performance.total_latency_ms",
    "Average request latency (ms)": "performance.avg_request_latency_ms",
    "Average time-to-first-token [TTFT] (ms)": "streaming_metrics.avg_ttft_ms",
    "Average time-per-output-token [TPOT] (ms)": "streaming_metrics.avg_tpot_ms",
    "[AL] AVERAGE": "decoding_stats.acceptance_length",
    "Dataset Path": "dataset.path",
}


def printed_records(text: str) -> list[Record]:
    """The reports in a text, each as the record of its JSON; empty without one."""
    return [*_serving(text), *_latency(text), *_trtllm(text)]


def _labelled(text: str, labels: Mapping[str, str]) -> dict[str, str]:
    """The values after labels, by their keys, whatever a log or a container prints before them; of several the last.

    A longer label may end with another one, as "Total Token Throughput" does.
    """
    found: dict[str, str] = {}
    for label, key in labels.items():
        line = rf"(?:^|[^A-Za-z\s])[ \t]*{re.escape(label)}\s*: +(\S.*?)\s*$"
        if values := re.findall(line, text, re.MULTILINE):
            found[key] = values[-1]
    return found


def _serving(text: str) -> Iterator[Record]:
    """Reports of serving benchmarks. What was asked may stand before a report instead of in it."""
    before, *blocks = _SERVING.split(text)
    for block in blocks:
        body, *rest = _END.split(block, maxsplit=1)
        record = dict.fromkeys(_SERVING_NEEDED, "") | _labelled(before + body, _SERVING_KEYS)
        before = "".join(rest)
        if record.get("max_concurrency") in ("not set", "None"):
            del record["max_concurrency"]
        # Of the two tools only SGLang prints its backend; only its JSON has this key.
        yield {**record, "sharegpt_output_len": ""} if "backend" in record else record


def _latency(text: str) -> Iterator[Record]:
    """Reports of `vllm bench latency`, with the shape that the command before them names."""
    for report in _LATENCY.finditer(text):
        commands = [found["options"] for found in _COMMAND.finditer(text, 0, report.start())]
        options = {name: _option(commands[-1], *option) for name, option in _OPTIONS.items()} if commands else {}
        percentiles = dict(_PERCENTILE.findall(report["rest"]))
        yield {"avg_latency": report["mean"], "latencies": "", "percentiles": percentiles, **options}


def _option(command: str, option: str, default: str | None) -> str | None:
    """The value of an option of a command; None if it is no number, or may be where the text does not show it."""
    if given := re.findall(rf"(?<!\S){option}[\s=\\]+(\S*)", command):
        value = given[-1].strip("'\"")
        return value if value.isdecimal() else None
    return None if _HIDDEN.search(command) else default


def _trtllm(text: str) -> Iterator[Record]:
    reports = len(_TRTLLM.findall(text))
    record: dict[str, dict[str, str]] = {"performance": {}, "request_info": {}}
    for path, value in _labelled(text, _TRTLLM_KEYS).items() if reports else ():
        section, _, key = path.partition(".")
        record.setdefault(section, {})[key] = value
    if averages := re.search(r"\bAVG:\s+([\d.]+)\s+([\d.]+)", text, re.MULTILINE):
        record["request_info"] |= {"avg_input_length": averages[1], "avg_output_length": averages[2]}
    # Of several reports it is not known which line belongs to which one, so their reader refuses them.
    yield from [record] * reports
