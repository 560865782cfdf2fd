"""Attention kernels: the pairs of a query and a key, and a call's traffic and memory besides Q, K, V and the result.

Amounts are numbers, or arrays with one per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.facts.step import FLOAT32_BYTES, Count, Step

if TYPE_CHECKING:
    from profiler.counting.attention import AttentionCore

_BOOL_BYTES = 1
_MOVED_BYTES = 2 * FLOAT32_BYTES  # a float32 that is written and read


def read_again(step: Step, shared: Any, unchosen: Any = 0) -> Any:
    """Return the cached tokens that a kernel reads again for each further sequence, though `shared` are the same ones.

    Others read a prefix once (Hydragen, arXiv:2402.05099). `unchosen` ones are not read; the rest differ if they can.
    """
    return np.maximum((step.batch - 1) * shared - step.batch * unchosen, 0)


def causal_pairs(query: Count, context: Count, window: int | None = None, *, rate: int = 1) -> Any:
    """Return the (query, key) pairs per sequence of causal attention: a query sees the cache, its past and itself.

    The sum over i = 1..query of min((context + i) // rate, window); a key stands for `rate` tokens.
    """

    def up_to(tokens: Any) -> Any:
        limit = tokens if window is None else np.minimum(tokens, window * rate)
        blocks = limit // rate
        whole = rate * (blocks * (blocks - 1) // 2) + blocks * (limit - blocks * rate + 1)
        return whole if window is None else whole + (tokens - limit) * window

    return up_to(context + query) - up_to(context)


def chunked_pairs(query: Count, context: Count, chunk: int) -> Any:
    """Return the (query, key) pairs per sequence within chunks: the sum over queries of i mod chunk + 1 (Llama 4)."""

    def up_to(tokens: Any) -> Any:
        whole, rest = divmod(tokens, chunk)
        return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2

    return up_to(context + query) - up_to(context)


@dataclass(frozen=True)
class Call:
    """A call of a kernel for an attention core, as transformers makes it."""

    core: AttentionCore
    step: Step
    keys: Any
    """Keys per sequence."""
    masked: bool
    """Whether it has a mask, instead of the flag that later keys are hidden."""
    repeated: Any
    """Whether transformers has written out the heads of K and V before, once per query head."""
    repeats: int
    """How often the kernel must repeat them; 1 if it gets as many, or the queries of a group as rows of one head."""

    @property
    def pairs(self) -> Any:
        """The (query, key) pairs per sequence, seen or hidden."""
        return self.step.query * self.keys

    @property
    def scores(self) -> Any:
        """Scores of all heads."""
        return self.step.batch * self.core.query_heads * self.pairs

    @property
    def narrow(self) -> bool:
        """Whether float32 is wider than the operands."""
        return self.core.itemsize < FLOAT32_BYTES

    @property
    def repeated_bytes(self) -> Any:
        """Bytes of K and V that were repeated per query head before the call."""
        core = self.core
        elements = self.step.batch * self.keys * core.query_heads * (core.qk_dim + core.v_dim)
        return np.where(self.repeated, elements * core.itemsize, 0)


@dataclass(frozen=True)
class Cost:
    keys: Any
    """Keys per sequence that it reads."""
    pairs: Any
    """The (query, key) pairs per sequence whose scores it computes."""
    traffic_bytes: Any
    """Traffic of scores and of copies."""
    repeating_bytes: Any
    """Traffic of K and V that are repeated per query head, before the call or in it: written and read."""
    scratch_bytes: Any
    """Peak memory, with K and V that were repeated before the call."""


def fused(call: Call) -> Cost:
    """A kernel that keeps its scores on chip. Without a mask it skips causally hidden ones."""
    pairs = call.pairs if call.masked else causal_pairs(call.step.query, call.step.context, call.core.window)
    return Cost(call.keys, pairs, 0, 2 * call.repeated_bytes, call.repeated_bytes)


def eager(call: Call) -> Cost:
    """`eager_attention_forward` of transformers: a matmul, a softmax in float32, and another matmul.

    Its memory has the scores in the model's dtype, for 16 bits a float32 copy, and the float32 output of the softmax.
    """
    itemsize = call.core.itemsize
    traffic_bytes = call.scores * (4 * itemsize + (_MOVED_BYTES if call.narrow else 0))
    buffer_bytes = call.scores * (itemsize + (2 if call.narrow else 1) * FLOAT32_BYTES)
    return Cost(call.keys, call.pairs, traffic_bytes, 2 * call.repeated_bytes, call.repeated_bytes + buffer_bytes)


def math(call: Call) -> Cost:
    """`_scaled_dot_product_attention_math` (torch 2.13, aten/src/ATen/native/transformers/attention.cpp).

    It computes in float32: it copies 16-bit Q, K and V, and the result. It repeats grouped heads of K and V, and
    multiplies Q and K by the square root of the scale. For several queries without a mask it makes a causal mask.

    The first matmul writes a score, the mask is added in place, the softmax reads and writes it, and the second
    one reads it. `_safe_softmax` also looks for fully masked rows: it reads the score, writes and reads a byte, and
    reads and writes the score again. 16-bit scores are copied too, into an unused result.

    Copies, repeated heads, the scaled Q and masks exist until the end. The peak is either at the first matmul, with
    the scaled K and the scores, or in the softmax, with the scores, its result and a byte for each. Since PyTorch PR
    #139613 `_safe_softmax` writes into that result.
    """
    core, step, scores = call.core, call.step, call.scores
    kv_heads = np.where(call.repeated, core.query_heads, core.kv_heads)
    q, result = (step.tokens * core.query_heads * width for width in (core.qk_dim, core.v_dim))
    k, v = (step.batch * call.keys * kv_heads * width for width in (core.qk_dim, core.v_dim))
    copied = q + k + v if call.narrow else 0
    repeated = call.repeats * (k + v) if call.repeats > 1 else 0
    scaled_k = call.repeats * k
    has_mask = call.masked | np.greater(step.query, 1)
    score_bytes = 7 * FLOAT32_BYTES + 2 * _BOOL_BYTES + np.where(has_mask, _MOVED_BYTES, 0)
    traffic_bytes = _MOVED_BYTES * (q + scaled_k + copied) + scores * score_bytes
    if call.narrow:
        traffic_bytes = traffic_bytes + _MOVED_BYTES * result + scores * (FLOAT32_BYTES + core.itemsize)
    mask_bytes = step.tokens * call.keys * (_BOOL_BYTES + core.itemsize)  # of one head, for all
    kept_bytes = FLOAT32_BYTES * (q + copied + repeated) + np.where(has_mask, mask_bytes, 0)
    matmul_bytes = FLOAT32_BYTES * (scaled_k + scores)
    softmax_bytes = (2 * FLOAT32_BYTES + _BOOL_BYTES) * scores
    return Cost(
        keys=call.keys,
        pairs=call.pairs,
        traffic_bytes=traffic_bytes,
        repeating_bytes=2 * call.repeated_bytes + _MOVED_BYTES * repeated,
        scratch_bytes=call.repeated_bytes + kept_bytes + np.maximum(matmul_bytes, softmax_bytes),
    )
