"""Predict the peak memory of a cell: weights, KV cache, activations and logits."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from profiler.counting.attention import AttentionCore
from profiler.counting.operators import Linear, ModelWork
from profiler.facts.step import Count, ExecutionPath, Step

_FLOAT32_BYTES = 4
# Tensors of the hidden size during each matrix product: the residual stream, its normalised copy and the new sum.
_LIVE_HIDDEN = 3
# Tensors of the hidden size during attention: the residual stream and its normalised copy.
_LIVE_HIDDEN_OF_ATTENTION = 2


def cache_bytes(work: ModelWork, batch_size: Count, tokens: Count) -> Any:
    """Return the bytes of the KV cache of `batch_size` sequences of `tokens` each; windows cap their layers.

    Arguments are integers, or int64 arrays that broadcast.
    """
    total: Any = 0
    for operator in work.operators:
        if isinstance(operator, AttentionCore):
            cached = tokens if operator.window is None else np.minimum(tokens, operator.window)
            total = total + operator.count * batch_size * cached * operator.cached_elements * operator.itemsize
    return total


def predicted_peak_bytes(
    work: ModelWork, weight_bytes: int, batch_size: Count, prompt_len: Count, new_tokens: Count, path: ExecutionPath
) -> Any:
    """Return the peak bytes of one cell: the weights, its cache at full length, and the peak of its prefill.

    That peak is in a matrix product, in attention, or at the logits. Arguments are integers, or int64 arrays that
    broadcast.
    """
    tokens = batch_size * prompt_len
    linears = [op for op in work.operators if isinstance(op, Linear) and op.rows == "tokens"]
    cores = [op for op in work.operators if isinstance(op, AttentionCore)]
    itemsize = max((op.activation_dtype.itemsize for op in linears), default=_FLOAT32_BYTES)
    widest = max(
        (op.weight.in_features + 2 * max(op.weight.out_features, op.weight.in_features) for op in linears), default=0
    )
    hidden = min((op.weight.in_features for op in linears), default=0)
    # Eager attention returns its scores, which exist until the layer ends.
    scores = tokens * prompt_len * max((core.query_heads for core in cores), default=0)
    scores_bytes = scores * itemsize if path.attention == "eager" else 0
    peaks_bytes = [tokens * (widest + _LIVE_HIDDEN * hidden) * itemsize + scores_bytes]
    step = Step(batch_size, prompt_len, 0)
    for core in cores:
        states = core.query_heads * core.qk_dim + core.kv_heads * (core.qk_dim + core.v_dim)
        states_bytes = tokens * (_LIVE_HIDDEN_OF_ATTENTION * hidden + states) * itemsize
        peaks_bytes.append(states_bytes + core.scratch_bytes(step, path))
    lm_heads = [op for op in work.operators if isinstance(op, Linear) and op.rows == "last"]
    rows = tokens if path.all_logits else batch_size
    peaks_bytes.append(sum(rows * op.weight.out_features * op.activation_dtype.itemsize for op in lm_heads))
    kv_bytes = cache_bytes(work, batch_size, prompt_len + new_tokens)
    layer_kv_bytes = kv_bytes // max(1, sum(core.count for core in cores))
    return weight_bytes + kv_bytes + layer_kv_bytes + reduce(np.maximum, peaks_bytes)
