"""Where JSON files have what: for each meaning the keys of all tools, with the unit of a time.

A place is a path of keys, `metrics.latency.median`. ` | ` is between paths of which the first with a value counts, and
` / ` between two numbers whose ratio it is (`readers/values.py`). The path of a time may end with its unit, `ttft:ms`.
A rate ends with `:/s`, in tokens per second. What no path can say, a format adds under a name of ours: `prompt_len`.
"""

PROMPT_LEN = (
    "prompt_len | input_len | prompt_eval_count | prompt_n | prompt_tokens | usage.prompt_tokens | stats.input_tokens"
)
"""Prompt tokens that were computed."""
NEW_TOKENS = (
    "new_tokens | output_len | eval_count | predicted_n | generation_tokens | usage.completion_tokens"
    " | usage.output_tokens | stats.total_output_tokens | progress_n"
)
REQUESTS = "requests | num_requests"
"""How many sequences shared the time, if it is not one batch's."""
PREFILL = (
    "prefill_s | prefill_latency | t_pp | T_PP s | prompt_eval_duration:ns | prompt_eval_rate:/s | prompt_ms:ms"
    " | prompt_per_second:/s | prompt_tps:/s | stats.time_to_first_token | stats.time_to_first_token_seconds"
    " | metrics.time_to_first_token_ms:ms"
)
"""The time of a prefill."""
DECODE = (
    "decode_s | median_decode_latency | t_tg | T_TG s | eval_duration:ns | eval_rate:/s | predicted_ms:ms"
    " | predicted_per_second:/s | generation_tps:/s | stats.tokens_per_second:/s | metrics.generation_time_ms:ms"
    " | progress_per_second:/s"
)
"""The same of a decode step, or of several."""
GENERATE = "latencies | percentiles.50 | avg_latency | elapsed_time | performance.total_latency_ms:ms"
"""The same of a whole `generate`: a number, or a list of repetitions, whose median counts."""

# With speculative decoding.
GIVES = (
    "accept_length | spec_decode_token_weighted_acceptance_length.avg | spec_decode_acceptance_length.avg"
    " | spec_decode_acceptance_length | acc_length | metrics.speculative_decoding.mean_acceptance_length"
    " | decoding_stats.acceptance_length | decoding_stats.acceptance_length_percentiles.average | acceptance"
)
"""Mean tokens per step, the one that every step gives included (docs.nvidia.com/nemo/automodel,
speculative.bench_sglang); -1 without speculation."""
DRAFTED = (
    "spec_decode_draft_tokens / spec_decode_num_drafts | total_draft_tokens.avg / total_spec_decode_steps.avg"
    " | metrics.speculative_decoding.num_draft_tokens / metrics.speculative_decoding.num_spec_steps"
)
"""Tokens per step that were drafted. A step processes one more."""
VERIFIED = "verified | server_info.speculative_num_draft_tokens"
"""Tokens per step that were processed."""

# Of a loaded server, whose client has a typical value and a mean. Its user may add keys, so lengths of ours come last.
CLIENT_PROMPT_LEN = (
    "input_sequence_length.avg | successes.prompt_len.mean | metrics.prompt_token_count.successful.median"
    " | total_input_tokens / completed | prompt_len"
)
CLIENT_NEW_TOKENS = (
    "output_sequence_length.avg | successes.output_len.mean | metrics.output_token_count.successful.median"
    " | total_output_tokens / completed | new_tokens"
)
_ITL, _LATENCY = "metrics.inter_token_latency_ms.successful", "successes.latency"
MEAN_TO_FIRST = (
    f"time_to_first_token.avg:ms | {_LATENCY}.time_to_first_token.mean | mean_ttft_ms:ms"
    " | streaming_metrics.avg_ttft_ms:ms"
)
TO_FIRST = (
    f"time_to_first_token.p50:ms | {_LATENCY}.time_to_first_token.median | median_ttft_ms:ms"
    f" | metrics.time_to_first_token_ms.successful.median:ms | {MEAN_TO_FIRST}"
)
"""The time to the first token."""
MEAN_PER_TOKEN = (
    f"inter_token_latency.avg:ms | {_LATENCY}.time_per_output_token.mean | mean_tpot_ms:ms | {_ITL}.mean:ms"
    " | streaming_metrics.avg_tpot_ms:ms"
)
PER_TOKEN = (
    f"inter_token_latency.p50:ms | {_LATENCY}.time_per_output_token.median | median_tpot_ms:ms | {_ITL}.median:ms"
    f" | {MEAN_PER_TOKEN}"
)
"""The time per token after the first."""
BETWEEN = "median_itl_ms:ms | mean_itl_ms:ms"
"""The typical time between arrivals, of one token or several."""
OUTPUT_PER_S = (
    "output_token_throughput.avg | successes.throughput.output_tokens_per_sec"
    " | metrics.output_tokens_per_second.successful.mean | performance.system_output_throughput_tok_s"
    " | total_output_tokens / duration | output_per_s"
)
"""New tokens of all requests per second."""
CAP = (
    "max_concurrency | load_summary.concurrency | config.strategy.streams"
    " | metrics.request_concurrency.successful.mean | asked"
)
"""The most requests allowed at a time."""
CACHE_DTYPE = "server_info.kv_cache_dtype | engine.kv_cache_dtype | kv_cache_dtype"

TP = "server_info.tp_size | tensor_parallel_size | tensor-parallel-size | tp | world_info.tp_size | tp_size"
DP = "server_info.dp_size | data_parallel_size | data-parallel-size | dp"
PP = "server_info.pp_size | pipeline_parallel_size | pipeline-parallel-size | pp | world_info.pp_size | pp_size"
SETTINGS = {
    "run": "run_at",
    "model's name": "model_id | input_config.models.items.name | input_config.endpoint.model_names"
    " | input_config.model_names | input_config.model | args.model | args.backend_kwargs.model | config.backend.model"
    " | engine.model | model",
    "server": "backend",
    "tp_size": TP,
    "pp_size": "server_info.pp_size",
    "dp_size": "server_info.dp_size",
    "quantization": "server_info.quantization | engine.quantization | model_info.quant",
    "device": "machine.name",
    "TensorRT LLM": "engine.version",
    "draft tokens": "server_info.speculative_num_draft_tokens",
    "request_rate": "request_rate",
    "burstiness": "burstiness",
    "max_concurrency": "max_concurrency",
    "requested_rate": "load_summary.requested_rate",
    "concurrency": "asked | load_summary.concurrency",
    "load": "config.strategy",
    "swept": "swept",
}
"""The settings of a result, by the names that a comparison uses; of a mapping, each key is a setting."""
