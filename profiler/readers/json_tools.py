"""The JSON of tools that time batches or requests, or load a server, one row of a table for each: `JSON_TOOLS`.

Where a tool writes what is in `readers/keys.py`; what follows from several keys, functions add to a record before. The
printed reports of vLLM, SGLang and TensorRT-LLM, and the lines of consoles, are read as the same records
(`readers/printed.py`).
"""

import math
import re
from dataclasses import replace
from functools import partial

from profiler.readers.formats import Format, batches, client, request
from profiler.readers.keys import DP, PP, TP
from profiler.readers.sources import Source
from profiler.readers.values import Record, first_of, inner, needed, number_at, whole_at, whole_of

_WHOLE = "prompt and generation in one figure"
_SHARED = "with data parallelism vLLM shares a mixture's experts among all replicas: the floor of a mixture is lower."
_BETWEEN = "it has no time per output token, so the time between arrivals is used."
_PINNED = "its tokens repeat, as with a pinned acceptance length: the tokens per step say nothing about real texts."


def _of_aiperf(record: Record) -> Record:
    """The cap of the last phase whose results count, else of the run.

    `effective_decode_concurrency` is the time-averaged number of requests in decode
    (docs.nvidia.com/aiperf/reference/effective-vs-active-metrics). Older versions, and genai-perf, have other paths.
    """
    phases = [each for each in inner(record, "input_config.phases") or [] if not each.get("exclude_from_results")]
    paths = "concurrency | loadgen.concurrency | perf_analyzer.stimulus.concurrency"
    asked = first_of(phases[-1] if phases else record.get("input_config") or {}, paths)
    return {"asked": asked, "decoding": inner(record, "effective_decode_concurrency.avg")}


def _of_server(record: Record) -> Record:
    """What follows from several keys of a serving benchmark.

    With `enable_dp_attention` all GPUs of `tp_size` have one model. vLLM's expert layers form a group of all replicas'
    GPUs (docs.vllm.ai, serving/data_parallel_deployment).
    """
    server, names, is_sweep = record.get("server_info") or {}, list(record), "run_number" in record
    replicas = 1 if server.get("enable_dp_attention") else whole_at(record, DP) or 1
    stages = whole_at(record, PP) or 1
    # The texts have far fewer tokens than were generated, while the drafts were accepted.
    kept = number_at(record, "total_output_tokens_retokenized / total_output_tokens")
    is_pinned = bool(record.get("accept_length") and kept and kept < 1 / 2)
    # SGLang's report since 2025 has only the time between tokens.
    between = {f"{of}_tpot_ms": record.get(f"{of}_itl_ms") for of in ("median", "mean")}
    is_between = "median_tpot_ms" not in record and any(between.values())
    remarks = {_PINNED: is_pinned, _SHARED: is_sweep and replicas > 1, _BETWEEN: is_between}
    return {
        "gpus": whole_at(record, TP),
        "stages": stages,
        "groups": replicas * stages,
        # A server whose settings have the algorithm, but without a value, does not speculate.
        "acceptance": -1 if server.get("speculative_algorithm", "unsaid") is None else None,
        # A sweep appends its parameters to a record, after the number of the run (vllm/benchmarks/sweep/serve.py).
        "swept": {name: record[name] for name in names[names.index("run_number") + 1 :]} if is_sweep else {},
        "remark": next((text for text, is_so in remarks.items() if is_so), ""),
        **(between if is_between else {}),
    }


_TRTLLM = ("performance.request_throughput_req_s", "performance.total_latency_ms")


def _of_trtllm(report: Record) -> Record:
    """Its lengths, by its rates: a dataset may only promise them."""
    per_s = needed(report, "performance.request_throughput_req_s")
    new = needed(report, "performance.system_output_throughput_tok_s") / per_s
    prompt = needed(report, "performance.system_total_throughput_tok_s") / per_s - new
    dataset = str(first_of(report, "dataset.path") or "").rpartition("/")[2]
    promised = re.search(r"(\d+)[_x](\d+)", dataset)
    differs = promised is not None and [int(each) for each in promised.groups()] != [round(prompt), round(new)]
    though = f", though the dataset is called {dataset}" if differs else ""
    return {
        "prompt_len": max(1, round(prompt)),
        "new_tokens": max(1, round(new)),
        "remark": f"its requests have {prompt:.4g} tokens in and {new:.4g} out on average{though}.",
        "acceptance": -1,  # a report on speculative decoding has a section on decoding
        "gpus": whole_at(report, TP),
        "stages": whole_at(report, PP),
        "groups": whole_at(report, PP),
    }


def _of_trtllm_run(report: Record) -> Record:
    """The same of a whole run, as only its time is known without `--streaming`.

    All requests are sent at once unless a concurrency is given, so a request's own latency is mostly the queue.
    Pipeline stages take turns in one step, and work at the same time on those of a whole run.
    """
    per_s, whole_ms = (needed(report, path) for path in _TRTLLM)
    own_ms = number_at(report, "performance.avg_request_latency_ms") or whole_ms
    at_once = min(number_at(report, "world_info.max_batch_size") or math.inf, per_s * own_ms / 1e3)
    gpus, stages = whole_at(report, TP), whole_at(report, PP)
    return {
        **_of_trtllm(report),
        "cap": max(1, round(at_once)),
        "requests": max(1, round(per_s * whole_ms / 1e3)),
        "gpus": (gpus or 1) * (stages or 1) if gpus or stages else None,
        "stages": None,
    }


_SGLANG_SHAPE = ("batch_size", "input_len", "output_len")


def _of_sglang_server(record: Record) -> Record:
    """The times of a prefill and a step.

    The input throughput is batch x prompt, cached tokens included, over the time until the last sequence's first token.
    The rest of the latency is that of the other tokens.
    """
    batch, whole, new = (whole_of(record.get(name), name, 1) for name in _SGLANG_SHAPE)
    first_s = batch * whole / needed(record, "input_throughput")
    rest_s, share = needed(record, "latency") - first_s, number_at(record, "cache_hit_rate") or 0.0
    # The last token is always computed, as it gives the first new one.
    cached = min(whole - 1, round(share * whole))
    return {
        "prompt_len": whole - cached,
        "cached": cached if share else None,
        "prefill_s": first_s,
        "decode_s": max(0.0, rest_s),
        "loop": new - 1,
        "acceptance": None,
        "notes": {"prefill": [f"{100 * share:.0f} % of the prompt came from a cache"] if share else []},
    }


def _unsaid(record: Record) -> Record:
    assumed = {"n_gpu_layers | on_gpu": "all layers on the GPU", "cached": "no token from a cache"}
    unsaid = [words for paths, words in assumed.items() if first_of(record, paths) is None]
    unsaid += ["no other request at the same time"] * bool(record.get("slots"))
    return {"remark": f"assumed, as the file does not say it: {', '.join(unsaid)}." if unsaid else ""}


_DRAFTS = (
    "predicted_n | usage.completion_tokens | stats.total_output_tokens",
    "draft_n_accepted | stats.accepted_draft_tokens_count | usage.accepted_draft_tokens_count",
    "draft_n | stats.total_draft_tokens_count | usage.total_draft_tokens_count",
)


def _of_llama_cpp(record: Record) -> Record:
    """llama-server names drafts if there were any, and llama-cli's runs are steps; rates alone say neither."""
    record = {**record, **(record.get("timings") or {})}
    if runs := whole_at(record, "runs"):
        record["predicted_n"] = runs + 1
    new, accepted, drafted = (whole_at(record, paths, 0) or 0 for paths in _DRAFTS)
    # A step without drafts gives one token, too. The last one may have given more than were written.
    drafting = accepted / (mean - 1) if (mean := number_at(record, "draft_mean_len") or 1.0) > 1 else 0.0
    steps = max(1, new - 1 - accepted, round(drafting))
    gives = (new - 1) / steps if drafted else -1 if record.get("predicted_n") else None
    more = {**record, "cached": record.get("cache_n"), "acceptance": gives, "verified": 1 + drafted / steps}
    return {**more, **_unsaid(more)}


def _of_vllm(record: Record) -> Record:
    """The prompt's tokens include the cached ones."""
    cached = whole_at(record, "usage.prompt_tokens_details.cached_tokens", 0)
    prompt = whole_at(record, "usage.prompt_tokens | usage.input_tokens", 0)
    return {
        "cached": cached,
        "prompt_len": prompt and max(1, prompt - (cached or 0)),
        "remark": "assumed, as the file does not say it: no other request at the same time.",
    }


def _runs(source: Source) -> list[Record]:
    """The whole answers, with their number if there are several. A stream's other lines have no figures."""
    ended = [each for each in source.records if each.get("done", True)] or source.records
    return [{**each, "run_at": at if len(ended) > 1 else ""} for at, each in enumerate(ended, 1)]


_AIPERF = Format(
    tool="AIPerf",
    has=("request_throughput", "request_latency", "output_token_throughput"),
    more=_of_aiperf,
    figures=partial(client, streams_by="--streaming"),
)
# vllm/benchmarks/serve.py and SGLang's bench_serving.py. `max_concurrency` is a cap: a semaphore that requests wait for
# (github.com/vllm-project/vllm/pull/9390).
_SERVING = Format(
    tool="vllm bench serve",
    has=("total_input_tokens", "total_output_tokens", "completed | duration"),
    more=_of_server,
    figures=client,
)
# `--report_json` (tensorrt_llm/bench/dataclasses/reporting.py).
_TRTLLM_RUN = Format(
    tool="trtllm-bench",
    has=_TRTLLM,
    records=lambda source: [source.only],
    more=_of_trtllm_run,
    figures=batches,
    notes={"generate": (f"{_WHOLE}, without --streaming",)},
)
# One request: what a server answers, or a console prints (`readers/printed.py`), by the same keys. The clock of all of
# them starts anew after the first token.
_OLLAMA = Format(
    tool="ollama",
    has=("eval_duration | eval_rate | done",),
    records=_runs,
    more=_unsaid,
    figures=request,
    packed_dtype="int8",
)

JSON_TOOLS = (
    # benchmarks.json has one benchmark per load (guidellm/benchmark/schemas). Its `time_per_output_token_ms` includes
    # the first token (guidellm/schemas/request_stats.py), so it is no decode step.
    Format(
        tool="GuideLLM",
        has=("benchmarks.metrics.time_to_first_token_ms",),
        records=lambda source: [{**source.only, **each} for each in source.only["benchmarks"]],
        figures=client,
    ),
    replace(
        _AIPERF,
        tool="genai-perf",
        has=(*_AIPERF.has, "input_config.perf_analyzer | input_config.formatted_model_name"),
    ),
    _AIPERF,
    # stage_N_lifecycle_metrics.json (inference_perf/reportgen), in seconds.
    Format(
        tool="inference-perf",
        has=("load_summary", "successes"),
        figures=partial(client, streams_by="`streaming: true` in the tool's `api` settings"),
    ),
    replace(
        _TRTLLM_RUN,
        has=(*_TRTLLM, "streaming_metrics.avg_tpot_ms"),
        more=_of_trtllm,
        figures=client,
    ),
    _TRTLLM_RUN,
    # python/sglang/bench_one_batch.py runs each shape once, and warms up only with the first shape.
    Format(
        tool="SGLang bench_one_batch",
        has=(*_SGLANG_SHAPE, "prefill_latency"),
        figures=batches,
        notes={
            "prefill": ("run once", "only the first shape was warmed up"),
            "decode": ("synchronised at every step",),
        },
    ),
    Format(
        tool="SGLang bench_one_batch_server",
        has=(*_SGLANG_SHAPE, "latency", "input_throughput", "output_throughput"),
        more=_of_sglang_server,
        figures=batches,
        notes={
            "prefill": ("until the last sequence's first token, including HTTP and the scheduler",),
            "decode": ("mean of all steps, including HTTP and the scheduler",),
        },
    ),
    # vllm/benchmarks/latency.py and throughput.py write no shape; `latency` prints one if its command is above.
    Format(
        tool="vllm bench latency",
        has=("avg_latency", "latencies", "percentiles"),
        more=lambda record: {"repeats": 0},  # the printed report has a mean of an unknown number
        figures=batches,
        notes={"generate": (_WHOLE,)},
    ),
    Format(
        tool="vllm bench throughput",
        has=("elapsed_time", "num_requests", "requests_per_second", "tokens_per_second"),
        figures=batches,
        notes={"generate": (_WHOLE, "its tokens/s include the prompts' tokens")},
    ),
    _OLLAMA,
    replace(
        _OLLAMA,
        tool="llama.cpp",
        has=("timings.predicted_ms | predicted_ms | prompt_ms | predicted_per_second | progress_n",),
        more=_of_llama_cpp,
    ),
    replace(_OLLAMA, tool="LM Studio", has=("stats.tokens_per_second",), more=_of_llama_cpp),
    # `--enable-per-request-metrics` and `--per-request-spec-decode-metrics` (docs/features).
    replace(
        _OLLAMA,
        tool="vLLM's answer",
        has=("metrics.generation_time_ms | metrics.speculative_decoding",),
        more=_of_vllm,
        packed_dtype="",
    ),
    replace(
        _OLLAMA,
        tool="mlx_lm",
        has=("generation_tps | prompt_tps",),
        more=lambda record: _unsaid({**record, "on_gpu": 100}),  # it does not split a model
        packed_dtype="float16",
    ),
    replace(_SERVING, tool="vllm bench sweep", has=(*_SERVING.has, "run_number"), repeated=True),
    replace(_SERVING, tool="SGLang bench_serving", has=(*_SERVING.has, "random_input_len | sharegpt_output_len")),
    _SERVING,
)
"""Every kind of JSON file that is read by paths of keys; the more specific first."""
