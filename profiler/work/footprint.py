"""Predicted peak bytes of a cell: weights, KV cache, activations, logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from profiler.work.attention import AttentionCore
from profiler.work.operators import Linear, ModelWork
from profiler.work.step import Count, ExecutionPath

_FLOAT32_BYTES = 4
# Residual stream, its normalised copy and the sum that replaces it are alive around each matrix.
_LIVE_HIDDEN = 3


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
    activations = tokens * (widest + _LIVE_HIDDEN * hidden) * itemsize
    matrices: Count = 0
    if path.attention == "eager" or not (path.fused and path.fused_masked):
        heads = max((core.query_heads for core in cores), default=0)
        matrices = tokens * prompt_len * heads * (2 * itemsize + _FLOAT32_BYTES)
    heads_out = [op for op in work.operators if isinstance(op, Linear) and op.rows == "last"]
    rows = tokens if path.all_logits else batch_size
    logits = sum(rows * op.weight.out_features * op.activation_dtype.itemsize for op in heads_out)
    cache = cache_bytes(work, batch_size, prompt_len + new_tokens)
    one_layer = cache // max(1, sum(core.count for core in cores))
    return weight_bytes + cache + one_layer + np.maximum(activations + matrices, logits)
