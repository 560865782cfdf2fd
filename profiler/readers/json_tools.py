"""The JSON of tools that time batches or requests, or load a server, one row of a table for each: `JSON_TOOLS`.

What a row needs beyond paths of keys, functions add to a record before. The printed reports of vLLM, SGLang and
TensorRT-LLM, and the lines of consoles, are read as the same records (`readers/printed.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from profiler.readers.formats import Client, Format, Steps
from profiler.readers.sources import Source
from profiler.readers.values import Record, first_of, inner, needed, number_at, whole_at, whole_of

_TP = "server_info.tp_size | tensor_parallel_size | tensor-parallel-size | tp | world_info.tp_size | tp_size"
_DP = "server_info.dp_size | data_parallel_size | data-parallel-size | dp"
_PP = "server_info.pp_size | pipeline_parallel_size | pipeline-parallel-size | pp | world_info.pp_size | pp_size"
_WHOLE = "prompt and generation in one figure"
_SHARED = "with data parallelism vLLM shares a mixture's experts among all replicas: the floor of a mixture is lower."
_BETWEEN = "it has no time per output token, so the time between arrivals is used."
_PINNED = "its tokens repeat, as with a pinned acceptance length: the tokens per step say nothing about real texts."


def _of_aiperf(record: Record) -> Record:
    """The cap of the last phase whose results count, else of the run."""
    phases = [each for each in inner(record, "input_config.phases") or [] if not each.get("exclude_from_results")]
    paths = "concurrency | loadgen.concurrency | perf_analyzer.stimulus.concurrency"
    return {"cap": first_of(phases[-1] if phases else record.get("input_config") or {}, paths)}


def _of_server(record: Record) -> Record:
    """What follows from several keys of a serving benchmark.

    With `enable_dp_attention` all GPUs of `tp_size` have one model. vLLM's expert layers form a group of all replicas'
    GPUs (docs.vllm.ai, serving/data_parallel_deployment).
    """
    server, names, is_sweep = record.get("server_info") or {}, list(record), "run_number" in record
    replicas = 1 if server.get("enable_dp_attention") else whole_at(record, _DP) or 1
    # The texts have far fewer tokens than were generated, while the drafts were accepted.
    kept = number_at(record, "total_output_tokens_retokenized / total_output_tokens")
    is_pinned = bool(record.get("accept_length") and kept and kept < 1 / 2)
    # SGLang's report since 2025 has only the time between tokens.
    between = {f"{of}_tpot_ms": record.get(f"{of}_itl_ms") for of in ("median", "mean")}
    is_between = "median_tpot_ms" not in record and any(between.values())
    remarks = {_PINNED: is_pinned, _SHARED: is_sweep and replicas > 1, _BETWEEN: is_between}
    return {
        "groups": replicas * (whole_at(record, _PP) or 1),
        # A server whose settings have the algorithm, but without a value, does not speculate.
        "unspeculated": -1 if server.get("speculative_algorithm", "unsaid") is None else None,
        # A sweep appends its parameters to a record, after the number of the run (vllm/benchmarks/sweep/serve.py).
        "swept": {name: record[name] for name in names[names.index("run_number") + 1 :]} if is_sweep else {},
        "remark": next((text for text, is_so in remarks.items() if is_so), ""),
        **(between if is_between else {}),
    }


# The JSON's keys, then the labels of the printed report.
_TRTLLM_PER_S = "performance.request_throughput_req_s | request_throughput_req_sec"
_TRTLLM_OUT = (
    "performance.system_output_throughput_tok_s | total_output_throughput_tokens_sec | token_throughput_tokens_sec"
)
_TRTLLM_TOTAL = "performance.system_total_throughput_tok_s | total_token_throughput_tokens_sec"
_TRTLLM_MS = "performance.total_latency_ms | total_latency_ms"
_TRTLLM_GIVES = "decoding_stats.acceptance_length | decoding_stats.acceptance_length_percentiles.average | al_average"


def _of_trtllm(report: Record) -> Record:
    """Its lengths, which the rates have, too, and a dataset may only promise."""
    per_s, lengths = needed(report, _TRTLLM_PER_S), str(report.get("avg") or "").split() or ["", ""]
    report = {"avg_input": lengths[0], "avg_output": lengths[1], **report}
    new = number_at(report, "request_info.avg_output_length | average_output_length_tokens | avg_output")
    new = new or needed(report, _TRTLLM_OUT) / per_s
    prompt = number_at(report, "request_info.avg_input_length | average_input_length_tokens | avg_input")
    prompt = prompt or needed(report, _TRTLLM_TOTAL) / per_s - new
    dataset = str(first_of(report, "dataset.path | dataset_path") or "").rpartition("/")[2]
    promised = re.search(r"(\d+)[_x](\d+)", dataset)
    differs = promised is not None and [int(each) for each in promised.groups()] != [round(prompt), round(new)]
    though = f", though the dataset is called {dataset}" if differs else ""
    return {
        "prompt_len": max(1, round(prompt)),
        "new_tokens": max(1, round(new)),
        "remark": f"its requests have {prompt:.4g} tokens in and {new:.4g} out on average{though}.",
        # The report has a section on decoding only with speculative decoding.
        "acceptance": first_of(report, _TRTLLM_GIVES) or -1,
    }


def _of_trtllm_run(report: Record) -> Record:
    """The same of a whole run, as only its time is known without `--streaming`.

    All requests are sent at once unless a concurrency is given, so a request's own latency is mostly the queue.
    Pipeline stages take turns in one step, and work at the same time on those of a whole run.
    """
    per_s, whole_ms = needed(report, _TRTLLM_PER_S), needed(report, _TRTLLM_MS)
    own_ms = number_at(report, "performance.avg_request_latency_ms | average_request_latency_ms") or whole_ms
    at_once = min(number_at(report, "world_info.max_batch_size") or math.inf, per_s * own_ms / 1e3)
    gpus, stages = whole_at(report, _TP), whole_at(report, _PP)
    return {
        **_of_trtllm(report),
        "cap": max(1, round(at_once)),
        "requests": max(1, round(per_s * whole_ms / 1e3)),
        "gpus": (gpus or 1) * (stages or 1) if gpus or stages else None,
    }


# Batches of a known shape.
_SHAPES, _OPTIONS = "config.scenario.input_shapes", "config.scenario.generate_kwargs"


def _of_optimum(record: Record) -> Record:
    """Its batch, and the steps of the decode loop, whose latency is that of all tokens after the first.

    (optimum_benchmark/scenarios/inference/scenario.py, atomic_decode_volume.) Before the prefill, `generate` repeats
    each prompt as often as the larger of the two numbers (transformers 5.23, generation/utils.py,
    _expand_inputs_for_generation). Of the GPUs of the machine, any number may have run.
    """
    copies = max(whole_at(record, f"{_OPTIONS}.{name}") or 1 for name in ("num_beams", "num_return_sequences"))
    notes = (f"each prompt runs as {copies} sequences: beams, or answers",) if copies > 1 else ()
    batch, new = (whole_at(record, path) for path in (f"{_SHAPES}.batch_size", f"{_OPTIONS}.max_new_tokens"))
    on_cpu = inner(record, "config.backend.device") == "cpu"
    names = "config.environment.cpu" if on_cpu else "config.environment.gpu | config.environment.cpu"
    return {
        "batch_size": batch and copies * batch,
        "loop": (new or 1) - 1,
        "notes": {"prefill": notes, "decode": notes},
        "device": first_of(record, names),
    }


_SGLANG_SHAPE = ("batch_size", "input_len", "output_len")


def _of_sglang_server(record: Record) -> Record:
    """The times of a prefill and a step.

    The input throughput is batch x prompt, cached tokens included, over the time until the last sequence's first token.
    The rest of the latency is that of the other tokens. `acc_length` is the server's avg_spec_accept_length: the mean
    number of tokens per step, including the one that every step gives (docs.nvidia.com/nemo/automodel,
    speculative.bench_sglang); -1 without speculative decoding.
    """
    batch, whole, new = (whole_of(record.get(name), name, 1) for name in _SGLANG_SHAPE)
    first_s = batch * whole / needed(record, "input_throughput")
    rest_s, share = needed(record, "latency") - first_s, number_at(record, "cache_hit_rate") or 0.0
    # The last token is always computed, as it gives the first new one.
    cached = min(whole - 1, round(share * whole))
    return {
        "input_len": whole - cached,
        "cached": cached if share else None,
        "acceptance": record.get("acc_length"),
        "first_s": first_s,
        "rest_s": max(0.0, rest_s),
        "loop": new - 1,
        "notes": {"prefill": [f"{100 * share:.0f} % of the prompt came from a cache"] if share else []},
    }


def _of_tgi(source: Source) -> list[Record]:
    """The rows of the latencies, whose shape is in the table above. Equal cells below each other are merged."""
    parameters = re.findall(r"\| (?:Model|Sequence Length|Decode Length) +\| (\S+)", source.text)[-3:]
    shape = dict(zip(("model", "input_len", "output_len"), parameters, strict=False))
    rows: list[dict[str, str]] = [{}]
    for row in source.records:
        rows.append({name: cell or rows[-1].get(name, "") for name, cell in row.items()})
    return [{**row, **shape, row["Step"]: row["Average"].removesuffix(" ms")} for row in rows[1:]]


# Keys of a configuration that are not settings: the shape, a name made of all other keys, and the repetitions.
_NO_SETTINGS = re.compile("batch_size|sequence_length|num_tokens_to_generate|name|(warmup|measurement)_iterations")
_IN_LOOP = "the loop of `generate`, including sampling, stop checks and the streamer"


def _of_transformers(result: Record) -> Record:
    """Its configuration, and the seconds of its steps.

    The streamer of `generate` adds a last stamp at its end, which is not a token's; continuous batching does not.
    """
    config = first_of(result, "metadata.config | config") or {}
    new = whole_at(config, "num_tokens_to_generate", 2) or 2
    factor = 1.0 if config.get("continuous_batching") else new / (new - 1)
    each = inner(result, "measurements.inter_token_latency") or []
    options = {name: value for name, value in config.items() if not _NO_SETTINGS.fullmatch(name)}
    clock = {"prefill": _clock_s(inner(result, "measurements.time_to_first_token")), "decode": factor * _clock_s(each)}
    return {"config": config, "options": options, "steps": [factor * seconds for seconds in each], "clock": clock}


def _clock_s(seconds: Sequence[float] | None) -> float:
    """The step of float32 timestamps after a long uptime, of which all times are multiples; 0 for a fine one."""
    step_s = 1 / max((each.as_integer_ratio()[1] for each in seconds or []), default=math.inf)
    return step_s if step_s > 1e-6 else 0.0


def _unsaid(record: Record) -> Record:
    assumed = {"n_gpu_layers | on_gpu": "all layers on the GPU", "cached": "no token from a cache"}
    unsaid = [words for paths, words in assumed.items() if first_of(record, paths) is None]
    unsaid += ["no other request at the same time"] * bool(record.get("slots"))
    return {"remark": f"assumed, as the file does not say it: {', '.join(unsaid)}." if unsaid else ""}


def _of_llama_cpp(record: Record) -> Record:
    """llama-server names drafts if there were any, and llama-cli's runs are steps; its rates alone say neither."""
    record = {**record, **(record.get("timings") or {})}
    if runs := whole_at(record, "runs"):
        record["predicted_n"] = runs + 1
    new, accepted, drafted = (whole_at(record, name, 0) or 0 for name in ("predicted_n", "draft_n_accepted", "draft_n"))
    # A step without drafts gives one token, too. The last one may have given more than were written.
    drafting = accepted / (mean - 1) if (mean := number_at(record, "draft_mean_len") or 1.0) > 1 else 0.0
    steps = max(1, new - 1 - accepted, round(drafting))
    gives = (new - 1) / steps if drafted else -1 if new else None
    more = {**record, "cached": record.get("cache_n"), "acceptance": gives, "verified": 1 + drafted / steps}
    return {**more, **_unsaid(more)}


def _of_vllm(record: Record) -> Record:
    """The prompt's tokens include the cached ones. `mean_acceptance_length` includes the token of every step."""
    spec = inner(record, "metrics.speculative_decoding") or {}
    drafted = number_at(spec, "num_draft_tokens / num_spec_steps")
    cached = whole_at(record, "usage.prompt_tokens_details.cached_tokens", 0)
    prompt = whole_at(record, "usage.prompt_tokens | usage.input_tokens", 0)
    return {
        **(record.get("metrics") or {}),
        "cached": cached,
        "prompt": prompt and max(1, prompt - (cached or 0)),
        "new": first_of(record, "usage.completion_tokens | usage.output_tokens"),
        "acceptance": spec.get("mean_acceptance_length"),
        "verified": drafted and 1 + drafted,
        "remark": "assumed, as the file does not say it: no other request at the same time.",
    }


def _runs(source: Source) -> list[Record]:
    """The whole answers, with their number if there are several. A stream's other lines have no figures."""
    ended = [each for each in source.records if each.get("done", True)] or source.records
    return [{**each, "run": at if len(ended) > 1 else ""} for at, each in enumerate(ended, 1)]


_Request = partial(Steps, batch_size="", repeats=1)
# Its `concurrency` is a cap. `effective_decode_concurrency` is the time-averaged number of requests in decode
# (docs.nvidia.com/aiperf/reference/effective-vs-active-metrics). Older versions, and genai-perf, have other paths.
_AIPERF = Format(
    tool="AIPerf",
    has=("request_throughput", "request_latency", "output_token_throughput"),
    more=_of_aiperf,
    figures=Client(
        prompt_len="input_sequence_length.avg",
        new_tokens="output_sequence_length.avg",
        output_per_s="output_token_throughput.avg",
        to_first="time_to_first_token.p50:ms | time_to_first_token.avg:ms",
        per_token="inter_token_latency.p50:ms | inter_token_latency.avg:ms",
        acceptance="spec_decode_token_weighted_acceptance_length.avg | spec_decode_acceptance_length.avg",
        drafted="total_draft_tokens.avg / total_spec_decode_steps.avg",
        decoding="effective_decode_concurrency.avg",
        streams_by="--streaming",
    ),
    settings={
        "model's name": "input_config.models.items.name | input_config.endpoint.model_names | input_config.model_names"
        " | input_config.model",
        "concurrency": "cap",
    },
)
# vllm/benchmarks/serve.py and SGLang's bench_serving.py. `max_concurrency` is a cap: a semaphore that requests wait for
# (github.com/vllm-project/vllm/pull/9390). The acceptance lengths are the mean number of tokens per step, including the
# one that every step gives. A step processes vLLM's drafts and one token more; SGLang's number includes that token.
_SERVING = Format(
    tool="vllm bench serve",
    has=("completed", "duration", "total_input_tokens", "total_output_tokens", "median_ttft_ms"),
    more=_of_server,
    figures=Client(
        prompt_len="total_input_tokens / completed",
        new_tokens="total_output_tokens / completed",
        output_per_s="total_output_tokens / duration",
        to_first="median_ttft_ms:ms | mean_ttft_ms:ms",
        per_token="median_tpot_ms:ms | mean_tpot_ms:ms",
        itl="median_itl_ms:ms | mean_itl_ms:ms",
        cap="max_concurrency",
        acceptance="accept_length | spec_decode_acceptance_length | unspeculated",
        drafted="spec_decode_draft_tokens / spec_decode_num_drafts",
        verified="server_info.speculative_num_draft_tokens",
    ),
    settings={"model's name": "model_id", "server": "backend", "tp_size": _TP}
    | {name: f"server_info.{name}" for name in ("pp_size", "dp_size", "quantization")}
    | {"draft tokens": "server_info.speculative_num_draft_tokens"}
    | {name: name for name in ("request_rate", "burstiness", "max_concurrency", "swept")},
    gpus=_TP,
    stages=_PP,
)
# `--report_json` (tensorrt_llm/bench/dataclasses/reporting.py).
_TRTLLM = Format(
    tool="trtllm-bench",
    has=(_TRTLLM_MS, _TRTLLM_PER_S),
    records=lambda source: [source.only],
    more=_of_trtllm_run,
    figures=Steps(
        prompt_len="prompt_len",
        new_tokens="new_tokens",
        generate="performance.total_latency_ms:ms | total_latency_ms:ms",
        repeats=1,
        notes={"generate": (f"{_WHOLE}, without --streaming",)},
    ),
    settings={
        "model's name": "engine.model | model",
        "quantization": "engine.quantization | quantization",
        "TensorRT LLM": "engine.version | tensorrt_llm_version",
        "tp_size": _TP,
        "device": "machine.name",
    },
)
# One request: what a server answers, or a console prints (`readers/printed.py`), by the same keys. The clock of all of
# them starts anew after the first token.
_OLLAMA = Format(
    tool="ollama",
    has=("eval_duration | eval_rate | done",),
    records=_runs,
    more=_unsaid,
    figures=_Request(
        "prompt_eval_count",
        "eval_count",
        prefill="prompt_eval_duration:ns | prompt_eval_rate:/s",
        decode="eval_duration:ns | eval_rate:/s",
    ),
    settings={"run": "run", "model's name": "model", "quantization": "model_info.quant"},
    packed_dtype="int8",
)
_ITL, _LATENCY = "metrics.inter_token_latency_ms.successful", "successes.latency"

JSON_TOOLS = (
    # benchmarks.json has one benchmark per load (guidellm/benchmark/schemas). Its `time_per_output_token_ms` includes
    # the first token (guidellm/schemas/request_stats.py), so it is no decode step.
    Format(
        tool="GuideLLM",
        has=("benchmarks.metrics.time_to_first_token_ms",),
        records=lambda source: [{**source.only, **each} for each in source.only["benchmarks"]],
        figures=Client(
            prompt_len="metrics.prompt_token_count.successful.median",
            new_tokens="metrics.output_token_count.successful.median",
            output_per_s="metrics.output_tokens_per_second.successful.mean",
            to_first="metrics.time_to_first_token_ms.successful.median:ms",
            per_token=f"{_ITL}.median:ms | {_ITL}.mean:ms",
            cap="config.strategy.streams | metrics.request_concurrency.successful.mean",
        ),
        settings={"model's name": "args.model | args.backend_kwargs.model", "load": "config.strategy"},
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
        figures=Client(
            prompt_len="successes.prompt_len.mean",
            new_tokens="successes.output_len.mean",
            output_per_s="successes.throughput.output_tokens_per_sec",
            to_first=f"{_LATENCY}.time_to_first_token.median | {_LATENCY}.time_to_first_token.mean",
            per_token=f"{_LATENCY}.time_per_output_token.median | {_LATENCY}.time_per_output_token.mean",
            cap="load_summary.concurrency",
            streams_by="`streaming: true` in the tool's `api` settings",
        ),
        settings={"requested_rate": "load_summary.requested_rate", "concurrency": "load_summary.concurrency"},
    ),
    # benchmark.json (optimum_benchmark/benchmark/base.py); benchmark_report.json names neither shapes nor a model.
    Format(
        tool="optimum-benchmark",
        has=(_SHAPES, "report.prefill.latency | report.decode.latency"),
        records=lambda source: [source.only],
        more=_of_optimum,
        figures=Steps(
            prompt_len=f"{_SHAPES}.sequence_length",
            new_tokens=f"{_OPTIONS}.max_new_tokens",
            prefill="report.prefill.latency.values | report.prefill.latency.mean",
            decode="report.decode.latency.values | report.decode.latency.mean",
        ),
        settings={
            "model's name": "config.backend.model",
            "precision": "config.backend.torch_dtype",
            "attention": "config.backend.attn_implementation",
            "device": "device",
            "transformers": "config.environment.transformers_version",
        },
    ),
    replace(
        _TRTLLM,
        has=(*_TRTLLM.has, "streaming_metrics.avg_tpot_ms | average_time_per_output_token_tpot_ms"),
        more=_of_trtllm,
        figures=Client(
            output_per_s=_TRTLLM_OUT,
            to_first="streaming_metrics.avg_ttft_ms:ms | average_time_to_first_token_ttft_ms:ms",
            per_token="streaming_metrics.avg_tpot_ms:ms | average_time_per_output_token_tpot_ms:ms",
            groups=_PP,
        ),
        gpus=_TP,
        stages=_PP,
    ),
    _TRTLLM,
    # text-generation-benchmark (benchmark/src/table.rs) calls a server's shards; its percentiles are of unsorted times.
    Format(
        tool="TGI's benchmark",
        has=("Step", "Batch Size", "p50"),
        records=_of_tgi,
        figures=Steps(batch_size="Batch Size", prefill="Prefill:ms", decode="Decode (token):ms"),
        settings={"model's name": "model"},
    ),
    # python/sglang/bench_one_batch.py runs each shape once, and warms up only with the first shape.
    Format(
        tool="SGLang bench_one_batch",
        has=(*_SGLANG_SHAPE, "prefill_latency"),
        figures=Steps(
            prefill="prefill_latency",
            decode="median_decode_latency",
            repeats=1,
            notes={
                "prefill": ("run once", "only the first shape was warmed up"),
                "decode": ("synchronised at every step",),
            },
        ),
    ),
    Format(
        tool="SGLang bench_one_batch_server",
        has=(*_SGLANG_SHAPE, "latency", "input_throughput", "output_throughput"),
        more=_of_sglang_server,
        figures=Steps(
            prefill="first_s",
            decode="rest_s",
            repeats=1,
            notes={
                "prefill": ("until the last sequence's first token, including HTTP and the scheduler",),
                "decode": ("mean of all steps, including HTTP and the scheduler",),
            },
        ),
    ),
    # benchmark_v2 maps the hash of a configuration to a result with `metadata`, `config` and `measurements`.
    Format(
        tool="transformers benchmark",
        has=("*.measurements.e2e_latency",),
        records=lambda source: [result for record in source.records for result in record.values()],
        more=_of_transformers,
        figures=Steps(
            prompt_len="config.sequence_length",
            new_tokens="config.num_tokens_to_generate",
            batch_size="config.batch_size",
            prefill="measurements.time_to_first_token",
            decode="steps",
            notes={"prefill": (_IN_LOOP,), "decode": (_IN_LOOP,)},
        ),
        settings={"options": "options", "model's name": "metadata.model_id", "transformers": "metadata.commit_id"}
        | {"device": "metadata.hardware_info.gpu_name"},
    ),
    # vllm/benchmarks/latency.py and throughput.py write no shape; `latency` prints one if its command is above.
    Format(
        tool="vllm bench latency",
        has=("avg_latency", "latencies", "percentiles"),
        figures=Steps(generate="latencies | percentiles.50 | avg_latency", notes={"generate": (_WHOLE,)}),
        gpus=_TP,
        stages=_PP,
    ),
    Format(
        tool="vllm bench throughput",
        has=("elapsed_time", "num_requests", "requests_per_second", "tokens_per_second"),
        figures=Steps(
            requests="num_requests",
            generate="elapsed_time",
            repeats=1,
            notes={"generate": (_WHOLE, "its tokens/s include the prompts' tokens")},
        ),
    ),
    _OLLAMA,
    replace(
        _OLLAMA,
        tool="llama.cpp",
        has=("timings.predicted_ms | predicted_ms | prompt_ms | predicted_per_second",),
        more=_of_llama_cpp,
        figures=_Request(
            "prompt_n",
            "predicted_n",
            prefill="prompt_ms:ms | prompt_per_second:/s",
            decode="predicted_ms:ms | predicted_per_second:/s",
        ),
    ),
    replace(
        _OLLAMA,
        tool="LM Studio",
        has=("stats.tokens_per_second",),
        figures=_Request(
            "usage.prompt_tokens",
            "usage.completion_tokens",
            prefill="stats.time_to_first_token",
            decode="stats.tokens_per_second:/s",
        ),
    ),
    # `--enable-per-request-metrics` and `--per-request-spec-decode-metrics` (docs/features).
    replace(
        _OLLAMA,
        tool="vLLM's answer",
        has=("metrics.generation_time_ms | metrics.speculative_decoding",),
        more=_of_vllm,
        figures=_Request("prompt", "new", "time_to_first_token_ms:ms", "generation_time_ms:ms"),
        packed_dtype="",
    ),
    replace(
        _OLLAMA,
        tool="mlx_lm",
        has=("generation_tps",),
        more=lambda record: _unsaid({**record, "on_gpu": 100}),  # it does not split a model
        figures=_Request("prompt_tokens", "generation_tokens", "prompt_tps:/s", "generation_tps:/s"),
        packed_dtype="float16",
    ),
    replace(_SERVING, tool="vllm bench sweep", has=(*_SERVING.has, "run_number"), repeated=True),
    replace(_SERVING, tool="SGLang bench_serving", has=(*_SERVING.has, "random_input_len | sharegpt_output_len")),
    _SERVING,
)
"""Every kind of JSON file that is read by paths of keys; the more specific first."""
