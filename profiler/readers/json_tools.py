"""The JSON of tools that time batches or load a server, one row of a table for each: `JSON_TOOLS`.

The printed reports of vLLM, SGLang and TensorRT-LLM are read as the same records (`readers/printed.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from profiler.grid.cells import PHASES
from profiler.readers.figures import Figure
from profiler.readers.formats import Client, Format, Steps, speculated
from profiler.readers.sources import Source
from profiler.readers.values import (
    Measured,
    Record,
    first_of,
    has,
    inner,
    needed,
    number_at,
    number_of,
    whole_at,
    whole_of,
)
from profiler.units import duration

_WHOLE = "prompt and generation in one figure"

# Clients of a server.


def _exported(source: Source) -> list[Record]:
    """Exports with their concurrency: of the last phase that is not excluded, as a warm-up is, or of the run."""
    records = []
    for record in source.records:
        phases = inner(record, "input_config.phases")
        asked = phases if isinstance(phases, list) else [record.get("input_config") or {}]
        counted = [phase for phase in asked if not phase.get("exclude_from_results")][-1:]
        paths = "concurrency | loadgen.concurrency | perf_analyzer.stimulus.concurrency"
        records.append({**record, "cap": first_of(counted[0], paths) if counted else None})
    return records


# Its `concurrency` is a cap. `effective_decode_concurrency` is the time-averaged number of requests in decode
# (docs.nvidia.com/aiperf/reference/effective-vs-active-metrics). Older versions, and genai-perf, have other paths.
_AIPERF = Format(
    tool="AIPerf",
    has=("request_throughput", "request_latency.unit", "output_token_throughput"),
    records=_exported,
    figures=Client(
        prompt_tokens="input_sequence_length.avg",
        new_tokens="output_sequence_length.avg",
        output_per_s="output_token_throughput.avg",
        ttft="time_to_first_token.p50 | time_to_first_token.avg",
        tpot="inter_token_latency.p50 | inter_token_latency.avg",
        cap="cap",
        decoding="effective_decode_concurrency.avg",
        unstreamed=", since without --streaming all tokens arrive at once; add --streaming",
    ),
    settings={
        "model's name": "input_config.models.items.name | input_config.endpoint.model_names | input_config.model_names"
        " | input_config.model",
        "AIPerf": "aiperf_version",
        "concurrency": "cap",
    },
    created="start_time",
)

# benchmarks.json has one benchmark per load (guidellm/benchmark/schemas). Its `time_per_output_token_ms` includes the
# first token (guidellm/schemas/request_stats.py), so it is no decode step.
_GUIDELLM = Format(
    tool="GuideLLM",
    has=("benchmarks.metrics.time_to_first_token_ms",),
    records=lambda source: [{**source.only, **each} for each in source.only["benchmarks"]],
    figures=Client(
        prompt_tokens="metrics.prompt_token_count.successful.median",
        new_tokens="metrics.output_token_count.successful.median",
        output_per_s="metrics.output_tokens_per_second.successful.mean",
        ttft="metrics.time_to_first_token_ms.successful.median",
        tpot="metrics.inter_token_latency_ms.successful.median",
        mean_tpot="metrics.inter_token_latency_ms.successful.mean",
        cap="config.strategy.streams | metrics.request_concurrency.successful.mean",
    ),
    settings={"model's name": "args.model | args.backend_kwargs.model", "load": "config.strategy"},
)

# stage_N_lifecycle_metrics.json (inference_perf/reportgen), in seconds.
_INFERENCE_PERF = Format(
    tool="inference-perf",
    has=("load_summary", "successes"),
    figures=Client(
        prompt_tokens="successes.prompt_len.mean",
        new_tokens="successes.output_len.mean",
        output_per_s="successes.throughput.output_tokens_per_sec",
        ttft="successes.latency.time_to_first_token.median | successes.latency.time_to_first_token.mean",
        tpot="successes.latency.time_per_output_token.median | successes.latency.time_per_output_token.mean",
        unit=1.0,
        cap="load_summary.concurrency",
        unstreamed="; measure with `streaming: true` in the tool's `api` settings",
    ),
    settings={"requested_rate": "load_summary.requested_rate", "concurrency": "load_summary.concurrency"},
)

_TP = "server_info.tp_size | tensor_parallel_size | tensor-parallel-size | tp"
_DP = "server_info.dp_size | data_parallel_size | data-parallel-size | dp"
_PP = "server_info.pp_size | pipeline_parallel_size | pipeline-parallel-size | pp"
_LOAD = ("request_rate", "burstiness", "max_concurrency")
# Keys of a record of `vllm bench serve` that are not parameters of a sweep.
_RESULTS = re.compile(
    r"(mean|median|std|p[\d.]+)_(ttft|tpot|itl|e2el)_ms|(total|spec_decode)_.*|max_(output_tokens_per_s"
    r"|concurrent_requests)"
    r"|.*(_throughput|_lens|_goodput|_id|_type)|date|backend|label|num_prompts|completed|failed|duration|ramp_up.*"
    r"|latencies|queue_times|start_times|ttfts|itls|generated_texts|errors|rtfx|run_number|"
)


def _of_server(source: Source) -> list[Record]:
    """Records of a serving benchmark with what follows from several of their keys.

    A step processes vLLM's drafts and one token more; SGLang's `speculative_num_draft_tokens` include that token. With
    `enable_dp_attention` all GPUs of `tp_size` have one model.
    """
    records = []
    for record in source.records:
        server, drafts = record.get("server_info") or {}, number_at(record, "spec_decode_num_drafts")
        replicas = 1 if server.get("enable_dp_attention") else whole_at(record, _DP) or 1
        # A server whose settings have the algorithm, but without a value, does not speculate.
        is_plain = "speculative_algorithm" in server and server["speculative_algorithm"] is None
        swept = {name: value for name, value in record.items() if name not in _LOAD and not _RESULTS.fullmatch(name)}
        more = {
            "replicas": replicas,
            "groups": replicas * (whole_at(record, _PP) or 1),
            "unspeculated": -1 if is_plain else None,
            "verified": 1 + needed(record, "spec_decode_draft_tokens") / drafts if drafts else None,
            "swept": swept if "run_number" in record else None,
        }
        records.append({**record, **more})
    return records


def _pinned(record: Record) -> str:
    """A remark if the texts have far fewer tokens than were generated, while the drafts were accepted."""
    again = number_at(record, "total_output_tokens_retokenized") if record.get("accept_length") else None
    if again is None or again >= needed(record, "total_output_tokens") / 2:
        return ""
    return "its tokens repeat, as with a pinned acceptance length: the tokens per step say nothing about real texts."


def _shares_experts(record: Record) -> str:
    """docs.vllm.ai, serving/data_parallel_deployment: expert layers form a group of all replicas' GPUs."""
    words = "with data parallelism vLLM shares a mixture's experts among all replicas: the floor of a mixture is lower."
    return words if record["replicas"] > 1 else ""


# vllm/benchmarks/serve.py and SGLang's bench_serving.py. `max_concurrency` is a cap: a semaphore that requests wait for
# (github.com/vllm-project/vllm/pull/9390). The acceptance lengths are the mean number of tokens per step, including the
# one that every step gives.
_SERVING = Format(
    tool="vllm bench serve",
    has=("completed", "duration", "total_input_tokens", "total_output_tokens", "median_ttft_ms"),
    records=_of_server,
    figures=Client(
        prompt_tokens="total_input_tokens / completed",
        new_tokens="total_output_tokens / completed",
        output_per_s="total_output_tokens / duration",
        ttft="median_ttft_ms | mean_ttft_ms",
        tpot="median_tpot_ms | mean_tpot_ms",
        itl="median_itl_ms | mean_itl_ms",
        cap="max_concurrency",
        acceptance="accept_length | spec_decode_acceptance_length | unspeculated",
        verified="verified | server_info.speculative_num_draft_tokens",
        groups="groups",
    ),
    settings={
        "model's name": "model_id",
        "server": "backend",
        "tp_size": _TP,
        **{name: f"server_info.{name}" for name in ("pp_size", "dp_size", "quantization")},
        "draft tokens": "server_info.speculative_num_draft_tokens",
        **{name: name for name in (*_LOAD, "swept")},
    },
    created="date",
    gpus=_TP,
    stages=_PP,
)

_TRTLLM_CLIENT = Client(
    prompt_tokens="request_info.avg_input_length",
    new_tokens="request_info.avg_output_length",
    output_per_s="performance.system_output_throughput_tok_s",
    ttft="streaming_metrics.avg_ttft_ms",
    tpot="streaming_metrics.avg_tpot_ms",
    acceptance="acceptance",
    groups="world_info.pp_size",
)


def _of_trtllm(source: Source) -> list[Record]:
    """The report with its lengths, which the rates have, too, and what its GPUs share."""
    report, per_s = source.only, "performance.request_throughput_req_s"
    new = needed(report, f"request_info.avg_output_length | performance.system_output_throughput_tok_s / {per_s}")
    prompt = number_at(report, "request_info.avg_input_length") or (
        needed(report, f"performance.system_total_throughput_tok_s / {per_s}") - new
    )
    gpus, stages = (whole_at(report, f"world_info.{name}") for name in ("tp_size", "pp_size"))
    is_streamed = number_at(report, _TRTLLM_CLIENT.tpot) is not None
    paths = "decoding_stats.acceptance_length | decoding_stats.acceptance_length_percentiles.average"
    more = {
        "request_info": {"avg_input_length": prompt, "avg_output_length": new},
        # The report has a section on decoding only with speculative decoding.
        "acceptance": first_of(report, paths) or -1,
        "is_streamed": is_streamed,
        # Pipeline stages take turns in one step, and work at the same time on those of a whole run.
        "gpus": (gpus or 1) * (1 if is_streamed else stages or 1) if gpus or stages else None,
        "stages": stages if is_streamed else 1,
    }
    return [{**report, **more}]


def _trtllm_figures(report: Record) -> list[Figure]:
    """A prefill and a step with `--streaming`. Without it only the time of the whole run is known.

    All requests are sent at once unless a concurrency is given, so that a request's own latency is mostly the queue.
    """
    if report["is_streamed"]:
        return _TRTLLM_CLIENT(report)
    seconds = needed(report, "performance.total_latency_ms") / 1e3
    per_s = needed(report, "performance.request_throughput_req_s")
    latency_s = (number_at(report, "performance.avg_request_latency_ms") or 1e3 * seconds) / 1e3
    most = number_at(report, "world_info.max_batch_size") or math.inf
    figure = Figure(
        covers="generate",
        time=Measured(seconds, repeats=1),
        prompt_len=max(1, round(report["request_info"]["avg_input_length"])),
        new_tokens=max(1, round(report["request_info"]["avg_output_length"])),
        shared_by=max(1, round(seconds * per_s)),
        cap=max(1, round(min(most, latency_s * per_s))),
        notes=(f"{_WHOLE}, without --streaming",),
    )
    return [speculated(figure, report["acceptance"])]


def _lengths(report: Record) -> str:
    """The lengths of requests, which a dataset may only promise."""
    prompt, new = report["request_info"].values()
    dataset = str(inner(report, "dataset.path") or "").rpartition("/")[2]
    promised = re.search(r"(\d+)[_x](\d+)", dataset)
    differs = promised is not None and [int(each) for each in promised.groups()] != [round(prompt), round(new)]
    though = f", though the dataset is called {dataset}" if differs else ""
    return f"its requests have {prompt:.4g} tokens in and {new:.4g} out on average{though}."


# `--report_json` (tensorrt_llm/bench/dataclasses/reporting.py).
_TRTLLM = Format(
    tool="trtllm-bench",
    has=("performance.total_latency_ms", "request_info"),
    records=_of_trtllm,
    figures=_trtllm_figures,
    settings={
        "model's name": "engine.model",
        "quantization": "engine.quantization",
        "TensorRT LLM": "engine.version",
        "tp_size": "world_info.tp_size",
        "device": "machine.name",
    },
    gpus="gpus",
    stages="stages",
    remark=_lengths,
)

# Batches of a known shape.


def _of_optimum(source: Source) -> list[Record]:
    """The report with its sequences, the tokens of its decode loop, and its device.

    Its decode latency is that of the whole loop after the first token, and its throughput is batch x (new tokens - 1)
    over that latency (optimum_benchmark/scenarios/inference/scenario.py, atomic_decode_volume). The configuration takes
    precedence, since the throughput counts beams as tokens. Before the prefill, `generate` repeats each prompt as often
    as the larger of the two numbers (transformers 5.23, generation/utils.py, _expand_inputs_for_generation).
    """
    record = source.only
    config, report = record.get("config") or {}, record.get("report", record)
    options = inner(config, "scenario.generate_kwargs") or {}
    copies = max(whole_at(options, name) or 1 for name in ("num_beams", "num_return_sequences"))
    tokens = 0
    if has(report, "decode.latency") and not options.get("max_new_tokens"):
        tokens = round(needed(report, "decode.latency.mean") * (number_at(report, "decode.throughput.value") or 0.0))
    batch_size = whole_at(config, "scenario.input_shapes.batch_size")
    # Of the GPUs of the machine, any number may have run.
    on_cpu = inner(config, "backend.device") == "cpu"
    more = {
        "report": report,
        "batch_size": batch_size and batch_size * copies,
        "loop_tokens": tokens,
        "device": first_of(config, "environment.cpu" if on_cpu else "environment.gpu | environment.cpu"),
        "notes": (
            # It polls its child without a pause on a core that the model may need.
            *(["its launcher kept one core busy during the measurement"]
              if inner(config, "launcher.name") == "process" else []),
            *([f"each prompt runs as {copies} sequences: beams, or answers"] if copies > 1 else []),
        ),
    }  # fmt: skip
    return [{**record, **more}]


# benchmark.json and benchmark_report.json (optimum_benchmark/benchmark/report.py); the second has no configuration.
_OPTIMUM = Format(
    tool="optimum-benchmark",
    has=(),
    any_of=("report.prefill.latency", "report.decode.latency", "prefill.latency", "decode.latency"),
    records=_of_optimum,
    figures=Steps(
        batch_size="batch_size",
        prompt_len="config.scenario.input_shapes.sequence_length",
        new_tokens="config.scenario.generate_kwargs.max_new_tokens",
        times={phase: f"report.{phase}.latency.values | report.{phase}.latency.mean" for phase in PHASES},
        shared_by={"decode": "loop_tokens"},
    ),
    settings={
        "model's name": "config.backend.model",
        "precision": "config.backend.torch_dtype",
        "attention": "config.backend.attn_implementation",
        "device": "device",
        "transformers": "config.environment.transformers_version",
        "optimum-benchmark": "config.environment.optimum_benchmark_version",
    },
)

# vllm/benchmarks/latency.py and throughput.py write no shape; what `latency` prints has one if its command is above it.
_VLLM_LATENCY = Format(
    tool="vllm bench latency",
    has=("avg_latency", "latencies", "percentiles"),
    figures=Steps(
        batch_size="batch_size",
        prompt_len="input_len",
        new_tokens="output_len",
        times={"generate": "latencies | percentiles.50 | avg_latency"},
        notes={"generate": (_WHOLE,)},
    ),
    gpus="tp",
    stages="pp",
)
_VLLM_THROUGHPUT = Format(
    tool="vllm bench throughput",
    has=("elapsed_time", "num_requests", "requests_per_second", "tokens_per_second"),
    figures=Steps(
        times={"generate": "elapsed_time"},
        repeats=1,
        shared_by={"generate": "num_requests"},
        notes={"generate": (_WHOLE, "its tokens/s include the prompts' tokens")},
    ),
)


def _named_apart(source: Source) -> list[Record]:
    """Records with the run's name, which may only name the shape, if several records have one shape."""
    shapes = {tuple(record.get(name) for name in _SGLANG_SHAPE) for record in source.records}
    is_needed = len(shapes) < len(source.records)
    return [{**record, "name": record.get("run_name") if is_needed else None} for record in source.records]


_SGLANG_SHAPE = ("batch_size", "input_len", "output_len")
_ONCE = "run once; only the first shape was warmed up"
# python/sglang/bench_one_batch.py runs each shape once, and warms up only with the first shape.
_SGLANG_OFFLINE = Format(
    tool="SGLang bench_one_batch",
    has=(*_SGLANG_SHAPE, "prefill_latency"),
    records=_named_apart,
    figures=Steps(
        batch_size="batch_size",
        prompt_len="input_len",
        new_tokens="output_len",
        times={"prefill": "prefill_latency", "decode": "median_decode_latency"},
        repeats=1,
        notes={"prefill": (_ONCE,), "decode": ("synchronised at every step",)},
    ),
    settings={"run_name": "name"},
)


def _sglang_server_figures(record: Record) -> list[Figure]:
    """The figures of bench_one_batch_server.

    Its input throughput is batch x prompt, cached tokens included, over the time until the last sequence's first token.
    The rest of the latency is that of the other tokens. `acc_length` is the server's avg_spec_accept_length: the mean
    number of tokens per step, including the one that every step gives (docs.nvidia.com/nemo/automodel,
    speculative.bench_sglang); -1 without speculative decoding.
    """
    batch_size, whole, new = (whole_of(record.get(name), name, 1) for name in _SGLANG_SHAPE)
    first_s = batch_size * whole / needed(record, "input_throughput")
    share = number_at(record, "cache_hit_rate")
    # The last token is always computed, as it gives the first new one.
    cached = min(whole - 1, round((share or 0.0) * whole))
    hit = (f"{100 * share:.0f} % of the prompt came from a cache",) if share else ()
    prefill = Figure(
        covers="prefill",
        time=Measured(first_s, repeats=1),
        batch_size=batch_size,
        prompt_len=whole - cached,
        context_len=cached if share else None,
        new_tokens=new,
        notes=("until the last sequence's first token, including HTTP and the scheduler", *hit),
    )
    rest_s = needed(record, "latency") - first_s
    if new == 1 or rest_s <= 0:
        return [prefill]
    step_s = Measured(rest_s / (new - 1), repeats=1)
    notes = ("mean of all steps, including HTTP and the scheduler",)
    decode = replace(prefill, covers="decode", time=step_s, notes=notes)
    return [prefill, speculated(decode, record.get("acc_length"))]


_SGLANG_SERVER = replace(
    _SGLANG_OFFLINE,
    tool="SGLang bench_one_batch_server",
    has=(*_SGLANG_SHAPE, "latency", "input_throughput", "output_throughput"),
    figures=_sglang_server_figures,
)

_FINE = 0.01
"""A clock is fine enough if its step is at most this share of the time."""
# The finest step that is looked for is 2^-13 s = 0.12 ms; a finer one cannot be distinguished from chance.
_FINEST_POWER = 14
# Keys of a configuration that are not settings: the shape, a name made of all other keys, and the repetitions.
_NO_SETTINGS = ("batch_size", "sequence_length", "num_tokens_to_generate", "name")
_ITERATIONS = ("warmup_iterations", "measurement_iterations")


def _of_transformers(source: Source) -> list[Record]:
    """The results by the hash of their configuration, each with what of the configuration is a setting."""
    records = []
    for result in (result for record in source.records for result in record.values()):
        config = first_of(result, "metadata.config | config") or {}
        options = {name: value for name, value in config.items() if name not in (*_NO_SETTINGS, *_ITERATIONS)}
        records.append({**result, "config": config, "options": options})
    return records


def _transformers_figures(result: Record) -> list[Figure]:
    config, found = result["config"], result["measurements"]
    batch_size, prompt_len = (whole_of(config.get(name), name, 1) for name in ("batch_size", "sequence_length"))
    new_tokens = whole_of(config.get("num_tokens_to_generate"), "num_tokens_to_generate", 2)
    steps = new_tokens - 1
    # The streamer of `generate` adds a last stamp at its end, which is not a token's; continuous batching does not.
    divisor = steps if config.get("continuous_batching") else new_tokens
    correction = [f"its file divides the time of {steps} steps by {divisor}: corrected"] if divisor > steps else []
    clock_s = _clock_step_s(found.get("time_to_first_token") or ())
    figures = []
    for covers, name, scale, resolution_s, notes in (
        ("prefill", "time_to_first_token", 1.0, clock_s, []),
        ("decode", "inter_token_latency", divisor / steps, clock_s / steps, correction),
    ):
        samples_s = tuple(scale * number_of(value, name) for value in found.get(name) or ())
        if not samples_s:
            continue
        time_s = Measured(median(samples_s), values=samples_s, repeats=len(samples_s))
        if resolution_s > _FINE * time_s.value:
            half_width_s = resolution_s + (max(samples_s) - min(samples_s)) / 2
            time_s = replace(time_s, values=(), half_width=half_width_s)
            notes = [
                f"a clock that steps by {duration(resolution_s)} (float32 timestamps on a machine with a long uptime)",
                *notes,
            ]
        notes = [*notes, "the loop of `generate`, including sampling, stop checks and the streamer"]
        figures.append(Figure(covers, time_s, batch_size, prompt_len, None, new_tokens, notes=tuple(notes)))
    return figures


def _clock_step_s(samples_s: Sequence[float]) -> float:
    """The step of the clock in seconds; 0 if it is too fine to be seen.

    The tool subtracts float32 values of perf_counter, whose resolution gets coarser with the time since boot: 7.8 ms
    after 18 hours, 62 ms after ten days.
    """
    for step_s in (2.0**-power for power in range(_FINEST_POWER)):
        if samples_s and all((value / step_s).is_integer() for value in samples_s):
            return step_s
    return 0.0


# benchmark_v2 maps the hash of a configuration to a result with `metadata`, `config` and `measurements`.
_TRANSFORMERS = Format(
    tool="transformers benchmark",
    has=("*.measurements.e2e_latency",),
    records=_of_transformers,
    figures=_transformers_figures,
    settings={
        "options": "options",
        "model's name": "metadata.model_id",
        "transformers": "metadata.commit_id",
        "device": "metadata.hardware_info.gpu_name",
    },
    created="metadata.timestamp",
)

JSON_TOOLS = (
    _OPTIMUM,
    _GUIDELLM,
    replace(_AIPERF, tool="genai-perf", any_of=("input_config.perf_analyzer", "input_config.formatted_model_name")),
    _AIPERF,
    _INFERENCE_PERF,
    _TRTLLM,
    _SGLANG_OFFLINE,
    _SGLANG_SERVER,
    _TRANSFORMERS,
    _VLLM_LATENCY,
    _VLLM_THROUGHPUT,
    replace(_SERVING, tool="vllm bench sweep", any_of=("run_number",), repeated=True, remark=_shares_experts),
    replace(_SERVING, tool="SGLang bench_serving", any_of=("random_input_len", "sharegpt_output_len"), remark=_pinned),
    _SERVING,
)
"""Every kind of JSON file that is read by paths of keys; the more specific first."""
