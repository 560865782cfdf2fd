"""Predicted peak bytes of a cell: weights, KV cache, activations, logits."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from profiler.counting.attention import AttentionCore
from profiler.counting.operators import Linear, ModelWork
from profiler.facts.step import Count, ExecutionPath, Step

_FLOAT32_BYTES = 4
# Residual stream, its normalised copy and the sum that replaces it are alive around each matrix.
_LIVE_HIDDEN = 3
# The residual stream and its normalised copy are alive around attention.
_LIVE_HIDDEN_OF_ATTENTION = 2


def cache_bytes(work: ModelWork, batch_size: Count, tokens: Count) -> Any:
    """Bytes of the KV cache of `batch_size` sequences of `tokens` each; windows cap what their layers hold.

    Whole numbers, or int64 arrays that broadcast.
    """
    total: Any = 0
    for operator in work.operators:
        if isinstance(operator, AttentionCore):
            held = tokens if operator.window is None else np.minimum(tokens, operator.window)
            total = total + operator.count * batch_size * held * operator.cached_elements * operator.itemsize
    return total


def predicted_peak_bytes(
    work: ModelWork, weight_bytes: int, batch_size: Count, prompt_len: Count, new_tokens: Count, path: ExecutionPath
) -> Any:
    """Peak bytes of one cell: the weights, its cache at full length, and the widest moment of its prefill.

    That moment is in a matrix product, in an attention core, or at the logits.

    Whole numbers, or int64 arrays that broadcast.
    """
    tokens = batch_size * prompt_len
    linears = [op for op in work.operators if isinstance(op, Linear) and op.rows == "tokens"]
    cores = [op for op in work.operators if isinstance(op, AttentionCore)]
    itemsize = max((op.activation_dtype.itemsize for op in linears), default=_FLOAT32_BYTES)
    widest = max(
        (op.weight.in_features + 2 * max(op.weight.out_features, op.weight.in_features) for op in linears), default=0
    )
    hidden = min((op.weight.in_features for op in linears), default=0)
    # Eager attention hands its scores back, and they live until the layer ends.
    scores = tokens * prompt_len * max((core.query_heads for core in cores), default=0)
    kept = scores * itemsize if path.attention == "eager" else 0
    moments = [tokens * (widest + _LIVE_HIDDEN * hidden) * itemsize + kept]
    step = Step(batch_size, prompt_len, 0)
    for core in cores:
        states = core.query_heads * core.qk_dim + core.kv_heads * (core.qk_dim + core.v_dim)
        states_bytes = tokens * (_LIVE_HIDDEN_OF_ATTENTION * hidden + states) * itemsize
        moments.append(states_bytes + core.scratch_bytes(step, path))
    heads_out = [op for op in work.operators if isinstance(op, Linear) and op.rows == "last"]
    rows = tokens if path.all_logits else batch_size
    logits = sum(rows * op.weight.out_features * op.activation_dtype.itemsize for op in heads_out)
    cache = cache_bytes(work, batch_size, prompt_len + new_tokens)
    one_layer = cache // max(1, sum(core.count for core in cores))
    return weight_bytes + cache + one_layer + reduce(np.maximum, [*moments, logits])
