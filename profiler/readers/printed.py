"""Read what tools print, as the records that they write with an option for JSON, or answer over HTTP.

Labels are those of vllm/benchmarks/serve.py and latency.py, of SGLang's bench_serving.py, and of TensorRT-LLM's
tensorrt_llm/bench/dataclasses/reporting.py, in their versions since 2024.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter

from profiler.readers.values import Record

_SERVING = re.compile(r"=+ Serving Benchmark Result =+")
_END = re.compile(r"^.*={20,}\s*$", re.MULTILINE)
_TRTLLM = re.compile(r"= PERFORMANCE OVERVIEW\s*\n.*={20,}")
_LATENCY = re.compile(r"Avg latency: +(?P<mean>[\d.e-]+) seconds(?P<rest>(?:\s+(?:Std|\d+% percentile) latency: .*)*)")
_THROUGHPUT = re.compile(r"Throughput: ([\d.]+) requests/s, ([\d.]+) total tokens/s, ([\d.]+) output tokens/s")
_HOUR_S = 3600  # of which a line without the number of requests tells as much as of its own time
_PERCENTILE = re.compile(r"(\d+)% percentile latency: +([\d.e-]+)")
# Defaults of the command. Its parser takes underscores for dashes (vllm/utils/argparse_utils.py).
_DEFAULTS = {"input_len": "32", "output_len": "128", "batch_size": "8"}
_OPTION = re.compile(r"(?<!\S)--?([\w-]+)[\s=\\]+['\"]?([^\s'\"]+)")
# A variable, or a file of options, may have any option.
_HIDDEN = re.compile(r"\$|--config\b")
_COMMAND = re.compile(r"(?:bench latency|benchmark_latency\.py)((?:[^\n\\]|\\\s*\n)*)")
# A log or a container may print something before a label.
_LABELLED = re.compile(r"([A-Z\[][\w ()/\[\]-]*?)[ \t]*: +(\S.*?)[ \t]*$", re.MULTILINE)
# Keys of JSON, and paths of keys, that are not the label.
_KEYS = {
    "successful_requests": "completed",
    "benchmark_duration_s": "duration",
    "total_generated_tokens": "total_output_tokens",
    "maximum_request_concurrency": "max_concurrency",
    "max_request_concurrency": "max_concurrency",
    "request_rate_configured_rps": "request_rate",
    "traffic_request_rate": "request_rate",
    "acceptance_length": "spec_decode_acceptance_length",
    "drafts": "spec_decode_num_drafts",
    "draft_tokens": "spec_decode_draft_tokens",
    "request_throughput_req_sec": "performance.request_throughput_req_s",
    "total_output_throughput_tokens_sec": "performance.system_output_throughput_tok_s",
    "token_throughput_tokens_sec": "performance.system_output_throughput_tok_s",
    "total_token_throughput_tokens_sec": "performance.system_total_throughput_tok_s",
    "total_latency_ms": "performance.total_latency_ms",
    "average_request_latency_ms": "performance.avg_request_latency_ms",
    "average_time_to_first_token_ttft_ms": "streaming_metrics.avg_ttft_ms",
    "average_time_per_output_token_tpot_ms": "streaming_metrics.avg_tpot_ms",
    "al_average": "decoding_stats.acceptance_length",
    "dataset_path": "dataset.path",
    "model": "engine.model",
    "quantization": "engine.quantization",
    "tensorrt_llm_version": "engine.version",
}


def printed_records(text: str) -> list[Record]:
    """The reports in a text, each as the record of its JSON; empty without one."""
    # Of several reports of TensorRT-LLM it is not known which line belongs to which one, so their reader refuses them.
    trtllm = [_labelled(text)] * len(_TRTLLM.findall(text))
    return [*_serving(text), *_latency(text), *_throughput(text), *trtllm]


def _labelled(text: str) -> dict[str, str]:
    """The values after the labels of lines, by the key of JSON or by the label, `mean_ttft_ms`; of several the last."""
    found = ((re.sub(r"\W+", "_", label.lower()).strip("_"), value) for label, value in _LABELLED.findall(text))
    return {_KEYS.get(name, name): value for name, value in found if value not in ("not set", "None")}


def _serving(text: str) -> Iterator[Record]:
    """Reports of serving benchmarks. What was requested may stand before a report instead of in it."""
    before, *blocks = _SERVING.split(text)
    for block in blocks:
        body, *rest = _END.split(block, maxsplit=1)
        named = _labelled(before + body)
        before = "".join(rest)
        # Of the two tools only SGLang prints its backend; only its JSON has this key.
        yield named | ({"sharegpt_output_len": ""} if "backend" in named else {})


def _latency(text: str) -> Iterator[Record]:
    """Reports of `vllm bench latency`, with the numbers of the command before them, of which the last counts."""
    for report in _LATENCY.finditer(text):
        commands = _COMMAND.findall(text[: report.start()])
        written = [option for command in commands[-1:] for option in _OPTION.findall(command)]
        given = {name.replace("-", "_"): value for name, value in written}
        usual = _DEFAULTS if commands and not _HIDDEN.search(commands[-1]) else {}
        options = {**usual, **{name: value for name, value in given.items() if value.isdecimal()}}
        percentiles = dict(_PERCENTILE.findall(report["rest"]))
        gpus = {"gpus": options.get("tensor_parallel_size") or options.get("tp")}
        yield {**options, **gpus, "avg_latency": report["mean"], "latencies": "", "percentiles": percentiles}


def _throughput(text: str) -> Iterator[Record]:
    """Lines of `vllm bench throughput`, whose rates give the tokens of a request."""
    for found in _THROUGHPUT.findall(text):
        per_s, total, output = map(float, found)
        yield {
            "elapsed_time": _HOUR_S,
            "num_requests": max(1, round(_HOUR_S * per_s)),
            "input_len": round((total - output) / per_s),
            "output_len": round(output / per_s),
            "requests_per_second": per_s,
            "tokens_per_second": total,
        }


# What ollama, llama.cpp, mlx_lm and LM Studio print about a request, by the keys of their JSON.
_CONSOLES = (
    (
        "prompt eval count: {prompt_eval_count} token",
        "prompt eval rate: {prompt_eval_rate} token",
        "eval count: {eval_count} token",
        "eval rate: {eval_rate} token",
    ),
    (
        "prompt eval time = {prompt_ms} ms / {prompt_n} tokens",
        "eval time = {predicted_ms} ms / {predicted_n} tokens",
        "eval time = {predicted_ms} ms / {runs} runs",
        "( {draft_n_accepted} accepted / {draft_n} generated)",
        "generated), mean len = {draft_mean_len}",
        "n_gen = {progress_n}, tg = {progress_per_second} t/s",
        "[ Prompt: {prompt_per_second} t/s | Generation: {predicted_per_second} t/s",
    ),
    (
        "Prompt: {prompt_tokens} tokens, {prompt_tps} tokens-per-sec",
        "Generation: {generation_tokens} tokens, {generation_tps} tokens-per-sec",
        "Timing with prompt_tokens={prompt_tokens}, generation_tokens={generation_tokens}, batch_size=1.",
        "Averages: prompt_tps={prompt_tps}, generation_tps={generation_tps}, peak",
    ),
    (
        "Tokens/Second: {stats.tokens_per_second}",
        "Time to First Token: {stats.time_to_first_token}s",
        "Prompt Tokens: {usage.prompt_tokens}",
        "Predicted Tokens: {usage.completion_tokens}",
        "Accepted {stats.accepted_draft_tokens_count}/{stats.total_draft_tokens_count} draft",
        "{stats.tokens_per_second} tok/sec • {usage.completion_tokens} tokens • {stats.time_to_first_token}s to",
    ),
)
_ABOVE = (
    *("({bits} BPW)", " -ngl {n_gpu_layers}", " --n-gpu-layers {n_gpu_layers}", " --gpu-layers {n_gpu_layers}"),
    *("offloaded {n_gpu_layers}/{all} layers to GPU", "{on_host}%/{on_gpu}% CPU/", "{on_gpu}% GPU"),
)
# Lines of CUDA and ROCm, then of Vulkan. Metal has one GPU.
_DEVICE = re.compile(
    r"(?m)^(?:[\d.]+ I)?\s*(?:Device (?P<number>\d+): |ggml_vulkan: (?P<at>\d+) = |ggml_metal_.*GPU name: +)"
    r"(?P<name>[^|\n]+?)(?:, (?:compute|gfx|VMM)|(?: \([^()]*\))* \|(?P<shares> uma: 1)?|$)"
)
_INTEGRATED = re.compile(r"Radeon(\(TM\))? (Graphics|\d{3}M)|UHD|Iris|uma: 1")
_EXPERTS_ON_HOST = re.compile(r"\s(?:-cmoe|--cpu-moe|(?:-ncmoe|--n-cpu-moe) [1-9]|(?:-ot|--override-tensor) \S+=CPU)")
# Of a request whose times come before.
_PROGRESS = {"progress_n", "progress_per_second"}  # whose last line counts
_TRAILING = {"draft_n", "draft_mean_len", "stats.total_draft_tokens_count"}


def gpus_in(text: str) -> list[str]:
    """The GPUs that llama.cpp lists. Each run numbers them from 0: the last one counts."""
    names: list[str] = []
    for found in _DEVICE.finditer(text):
        names = [*names[: int(found["number"] or found["at"] or 0)], found["name"] + (found["shares"] or "")]
    return names


def used_of(gpus: Sequence[str]) -> list[str]:
    """Those that run by default: all, but no integrated one beside others (src/llama.cpp)."""
    return [name for name in gpus if not _INTEGRATED.search(name)] or list(gpus)


def console_requests(text: str) -> Iterator[Sequence[Record]]:
    """What consoles print about requests, by tool, each as the record of its JSON.

    A line of a kind that a request already has begins another one; drafts without times are of a request that was cut
    off. What a log says of its first model holds for all.
    """
    above = dict(chain(*(next(_filled(line, text), (0, {}))[1].items() for line in _ABOVE)))
    if _EXPERTS_ON_HOST.search(text):
        above["on_host"] = "experts"
    if re.search(r"\b100% CPU\b", text):  # by `ollama ps`
        above["n_gpu_layers"] = "0"
    gpus = used_of(gpus_in(text))
    slots = {*re.findall(r"slot print_timing: id +(\d+)", text)}
    above |= {
        "machine.name": ", ".join(dict.fromkeys(name.removesuffix(" uma: 1") for name in gpus)),
        "stages": str(len(gpus) or ""),
        "slots": "several" if len(slots) > 1 else "",
    }
    for lines in _CONSOLES:
        requests: list[dict[str, str]] = []
        for _, found in sorted(chain(*(_filled(line, text) for line in lines)), key=itemgetter(0)):
            if not requests or not (found.keys() - _PROGRESS).isdisjoint(requests[-1]):
                if not found.keys().isdisjoint(_TRAILING):
                    continue
                requests.append(dict(above))
            requests[-1] |= found
        yield requests


def _filled(line: str, text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Where a line is in a text, with its values by the names in it.

    Between words may be any number of spaces, and around a `•` line ends, as in a copy of LM Studio's window.
    """
    words, names = re.split(r"\{.*?\}", line), re.findall(r"\{(.*?)\}", line)
    if max(" ".join(words).split(), key=len) in text:
        parts = (re.escape(each).replace(r"\ •\ ", r"\s*•\s*").replace(r"\ ", r"[^\S\n]*") for each in words)
        pattern = r"(\d\S{0,30}?)".join(parts)
        for found in re.finditer(r"(?<!prompt )(?<!\d)" + pattern + ("" if words[-1] else r"(?!\S)"), text):
            values = (re.sub(r"^(\d+),(\d+)$", r"\1.\2", value) for value in found.groups())
            yield found.start(), dict(zip(names, values, strict=True))
