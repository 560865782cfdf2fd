"""FLOPs and bytes of attention: causal pairs, windows, latent heads, and the math kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.counting.operators import Operator
from profiler.facts.operators import Cause
from profiler.facts.step import Count, ExecutionPath, Heads, Step, Work

SOFTMAX_FLOPS_PER_SCORE = 5
"""Maximum, subtraction, exponential, sum, division."""

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class AttentionCore(Operator):
    """softmax(Q K^T) V of one layer, with its cache."""

    query_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    itemsize: int
    """Bytes of an element of Q, K and V."""
    window: int | None = None
    """Keys that a query may see, itself included; None: all."""
    latent_dim: int | None = None
    """Elements cached a token where a compressed latent is cached instead of K and V heads (MLA)."""
    expanded_dim: int | None = None
    """Elements a head that the latent is expanded to over the whole context at every step (MLA in transformers)."""

    @property
    def cached_elements(self) -> int:
        """Elements that the cache holds a token in this layer."""
        return self.latent_dim if self.latent_dim is not None else self.kv_heads * (self.qk_dim + self.v_dim)

    def each(self, step: Step, path: ExecutionPath) -> Work:
        flops_per_pair = 2 * self.query_heads * (self.qk_dim + self.v_dim)
        pairs = step.batch * causal_pairs(step.query, step.context, self.window)
        executed_pairs = step.batch * self._executed_pairs(step, path)
        live = step.context if self.window is None else np.minimum(step.context, self.window - 1)
        token_bytes = self.cached_elements * self.itemsize
        by_heads = pairs * flops_per_pair
        needed = self._needed_flops(by_heads, pairs, step.batch * live)
        return Work(
            model_flops=needed,
            vector_flops=SOFTMAX_FLOPS_PER_SCORE * self.query_heads * pairs,
            kv_read_bytes=step.batch * live * token_bytes,
            kv_write_bytes=step.tokens * token_bytes,
            activation_bytes=step.tokens * self.query_heads * (self.qk_dim + self.v_dim) * self.itemsize,
            avoidable_flops={
                Cause.MASKED_SCORES: (executed_pairs - pairs) * flops_per_pair,
                Cause.LATENT_EXPANDED: by_heads - needed,  # less here, for what `kv_b_proj` does more
            },
            avoidable_bytes=self._avoidable_bytes(step, path, live),
        )

    def _needed_flops(self, by_heads: Any, pairs: Any, cached_tokens: Any) -> Any:
        """FLOPs of the algorithm; over a cache of latents those of the way that needs fewer.

        DeepSeek-V2 (arXiv:2405.04434, section 2.1.2): either the cached latents are expanded to heads first, or that
        expansion is absorbed into query and output, and each pair is a product with the latent and its rotary part and
        one with the latent. What is absorbed works as much on new tokens as expanding these, which the linear counts
        (`kv_b_proj`). Either way reads the latents alone.
        """
        if self.latent_dim is None or self.expanded_dim is None:
            return by_heads
        rotary = self.qk_dim - (self.expanded_dim - self.v_dim)
        rank = self.latent_dim - rotary
        expanding = cached_tokens * 2 * rank * self.query_heads * self.expanded_dim
        absorbed = pairs * 2 * self.query_heads * (self.latent_dim + rank)
        return np.minimum(by_heads + expanding, absorbed)

    def _held(self, step: Step, path: ExecutionPath) -> Any:
        """Keys that the kernel is handed for each sequence."""
        if path.cache == "static":
            slots = self._slots(path)
            return np.maximum(slots, np.minimum(step.context, slots - 1) + step.query)
        past = step.context if self.window is None else np.minimum(step.context, self.window - 1)
        return past + step.query

    def _handed(self, step: Step, path: ExecutionPath) -> Any:
        """Keys that the kernel multiplies: without a mask `sdpa` cuts the empty slots behind a prompt off."""
        held = self._held(step, path)
        if path.cache != "static" or path.attention == "eager":
            return held
        return np.where(self.masked(step, path), held, step.query)

    def _slots(self, path: ExecutionPath) -> Any:
        """Of a static cache in this layer: no more than its window (cache_utils.py, `StaticSlidingWindowLayer`)."""
        return path.static_cache_len if self.window is None else np.minimum(path.static_cache_len, self.window)

    def _copied_slots(self, step: Step, path: ExecutionPath) -> Any:
        """Tokens that are read and written so often as a cache takes new ones beyond its own slots in.

        A dynamic cache concatenates (`DynamicLayer.update`). A static one whose window is full rolls all its slots for
        a single token and copies them back; more of them it concatenates, and copies the last ones back.
        """
        held = self._held(step, path)
        if path.cache == "dynamic":
            return held
        slots, one = self._slots(path), np.asarray(step.query) == 1
        joined = np.where(np.asarray(step.context) > 0, held, 0)
        return np.where(step.context + step.query > slots, slots + np.where(one, slots, joined), 0)

    def masked(self, step: Step, path: ExecutionPath) -> Any:
        """Whether transformers hands the kernel of `sdpa` a mask instead of its causal flag.

        It does once a window hides held keys, for new tokens after a cache, and for every decode step on a static
        cache (masking_utils.py, `_ignore_causal_mask_sdpa` and `create_causal_mask`, 5.23), and wherever a prompt of
        the batch is padded.
        """
        held = self._held(step, path)
        window = np.inf if self.window is None else self.window
        several = np.asarray(step.query) > 1
        past = (several & (np.asarray(step.context) > 0)) | (~several & (path.cache == "static"))
        return (np.asarray(held) >= window) | past | path.masks

    def _executed_pairs(self, step: Step, path: ExecutionPath) -> Any:
        full = step.query * self._handed(step, path)
        if path.attention == "eager" or not path.fused:
            return full
        return np.where(self.masked(step, path), full, causal_pairs(step.query, step.context, self.window))

    def _hands(self, heads: Heads, step: Step, path: ExecutionPath) -> Any:
        """Whether transformers hands grouped heads so to the kernel of `sdpa`."""
        masked = path.masked_heads.get(self.qk_dim)
        several = np.asarray(step.query) > 1
        with_mask = np.where(several, heads == "repeated", heads == "packed") if masked is None else masked == heads
        without = path.heads.get(self.qk_dim, "grouped") == heads
        return np.where(self.masked(step, path), with_mask, without) & (self.query_heads > self.kv_heads)

    def _repeats_heads(self, step: Step, path: ExecutionPath) -> Any:
        """Whether transformers writes K and V out once a query head, before the kernel; eager attention always does."""
        if path.attention == "eager":
            return self.query_heads > self.kv_heads
        return self._hands("repeated", step, path)

    def _runs_math(self, step: Step, path: ExecutionPath) -> Any:
        """Whether `sdpa` has no fused kernel for the step."""
        return np.where(self.masked(step, path), not path.fused_masked, not path.fused) & (path.attention != "eager")

    def _math_kernel(self, step: Step, path: ExecutionPath) -> MathKernel:
        keys = self._handed(step, path)
        cached = step.batch * keys * np.where(self._repeats_heads(step, path), self.query_heads, self.kv_heads)
        queries = step.tokens * self.query_heads
        return MathKernel(
            itemsize=self.itemsize,
            q=queries * self.qk_dim,
            k=cached * self.qk_dim,
            v=cached * self.v_dim,
            repeats=np.where(self._hands("grouped", step, path), self.query_heads // self.kv_heads, 1),
            outputs=queries * self.v_dim,
            scores=queries * keys,
            mask=step.tokens * keys,
            masked=self.masked(step, path) | (np.asarray(step.query) > 1),
        )

    def _avoidable_bytes(self, step: Step, path: ExecutionPath, live: Count) -> dict[Cause, Count]:
        """Traffic beyond reading the live cache once and writing the new tokens once.

        Read in transformers 5.23. What a cache copies is read and written before the kernel reads it. A static one is
        read to its last slot, but by `sdpa` without a mask, which is handed the prompt's own. `repeat_kv` writes K and
        V out once a query head and reads those, and the math kernel does so itself where heads reach it grouped; an
        unfused kernel writes its scores out.
        """
        token_bytes = step.batch * self.cached_elements * self.itemsize
        held = self._held(step, path)
        bytes_: dict[Cause, Count] = {}
        if path.cache == "static":
            read = (np.asarray(step.query) == 1) | self.masked(step, path) | (path.attention == "eager")
            empty = np.maximum(held - live - step.query, 0)
            bytes_[Cause.UNFILLED_SLOTS] = np.where(read, empty, 0) * token_bytes
        if path.cache == "dynamic" or (path.cache == "static" and self.window is not None):
            bytes_[Cause.CACHE_COPIES] = 2 * self._copied_slots(step, path) * token_bytes
        repeated_bytes = 2 * self._repeated_bytes(step, path)
        unfused, math = self._runs_math(step, path), self._math_kernel(step, path)
        if self.expanded_dim is not None:
            expanded = step.batch * held * self.query_heads * self.expanded_dim * self.itemsize
            bytes_[Cause.LATENT_EXPANDED] = expanded + repeated_bytes
        elif self.query_heads > self.kv_heads:
            before = np.where(self._repeats_heads(step, path), repeated_bytes, 0)
            bytes_[Cause.REPEATED_HEADS] = before + np.where(unfused, math.repeated_bytes, 0)
        if path.attention == "eager":
            upcast = 2 * _FLOAT32_BYTES if self.itemsize < _FLOAT32_BYTES else 0
            bytes_[Cause.ATTENTION_MATRIX] = math.scores * (4 * self.itemsize + upcast)
        else:
            bytes_[Cause.ATTENTION_MATRIX] = np.where(unfused, math.traffic_bytes, 0)
        return bytes_

    def _repeated_bytes(self, step: Step, path: ExecutionPath) -> Any:
        """K and V written out once a query head."""
        return step.batch * self._handed(step, path) * self.query_heads * (self.qk_dim + self.v_dim) * self.itemsize

    def scratch_bytes(self, step: Step, path: ExecutionPath) -> Any:
        """Most bytes that one layer's attention holds at once beside Q, K, V, its cache and its result.

        Repeated heads, and what an unfused kernel holds. Eager attention holds its scores in the model's dtype, the
        float32 copy of 16 bits that the softmax reads, and the float32 that it writes.
        """
        before = np.where(self._repeats_heads(step, path), self._repeated_bytes(step, path), 0)
        math = self._math_kernel(step, path)
        if path.attention == "eager":
            copies = 2 if self.itemsize < _FLOAT32_BYTES else 1
            return before + math.scores * (self.itemsize + copies * _FLOAT32_BYTES)
        return before + np.where(self._runs_math(step, path), math.scratch_bytes, 0)


def causal_pairs(query: Count, context: Count, window: int | None = None) -> Any:
    """Pairs (query, key) that causal attention needs a sequence: query i sees the cache, its past and itself.

    sum over i = 1..query of min(context + i, window): the exact triangle, which a window caps.
    """
    if window is None:
        return query * context + query * (query + 1) // 2
    if window < 1:
        raise ValueError(f"a sliding window must hold at least 1 key, not {window}")
    free = np.clip(window - np.asarray(context), 0, query)  # queries that the window does not cap yet
    return free * context + free * (free + 1) // 2 + (query - free) * window


_BOOL_BYTES = 1


@dataclass(frozen=True)
class MathKernel:
    """One call of `_scaled_dot_product_attention_math` (torch 2.13, aten/src/ATen/native/transformers/attention.cpp).

    Sizes are numbers of elements. It computes in float32: Q, K and V of 16 bits are copied, and so is the result. Fewer
    heads of K and V than of Q are repeated. Q and K are multiplied by the root of the scale.
    """

    itemsize: int
    """Bytes of an element of Q, K, V and the result."""
    q: Any
    k: Any
    v: Any
    repeats: Any
    """How often K and V are written out: query heads a head of K."""
    outputs: Any
    scores: Any
    mask: Any
    """Scores of one head, which share a mask."""
    masked: Any
    """Whether a mask, or the causal one that it makes itself, is added to the scores."""

    @property
    def repeated_bytes(self) -> Any:
        """Traffic of K and V once a query head: written, and read."""
        return np.where(self.repeats > 1, 2 * _FLOAT32_BYTES * self.repeats * (self.k + self.v), 0)

    @property
    def traffic_bytes(self) -> Any:
        """Traffic beside that, and beside reading Q, K and V and writing the result as a fused kernel does.

        A score is written by the first product, masked in place, read and written by the softmax, read for rows that
        are hidden whole (`_safe_softmax`: a byte is written and read, and the score read and written again), and read
        by the second product. Those of 16 bits are copied into these as well, a result that nobody asked for.
        """
        twice = 2 * _FLOAT32_BYTES
        a_score = 7 * _FLOAT32_BYTES + 2 * _BOOL_BYTES + np.where(self.masked, twice, 0)
        copied = twice * (self.q + self.k + self.v + self.outputs) + self.scores * (_FLOAT32_BYTES + self.itemsize)
        scaled = twice * (self.q + self.repeats * self.k)
        return scaled + self.scores * a_score + (copied if self._copies else 0)

    @property
    def scratch_bytes(self) -> Any:
        """Most bytes held at once beside Q, K, V and the result.

        Copies, repeated heads, the scaled Q and masks stay to the end. The rest is most either at the first product,
        with the scaled K and the scores, or in the softmax, with the scores, its result and a byte for each: since
        PyTorch PR #139613 `_safe_softmax` writes into that result.
        """
        repeated = np.where(self.repeats > 1, self.repeats * (self.k + self.v), 0)
        copied = self.q + self.k + self.v if self._copies else 0
        masks = np.where(self.masked, self.mask * (_BOOL_BYTES + self.itemsize), 0)
        product = _FLOAT32_BYTES * (self.repeats * self.k + self.scores)
        softmax = (2 * _FLOAT32_BYTES + _BOOL_BYTES) * self.scores
        return _FLOAT32_BYTES * (self.q + copied + repeated) + masks + np.maximum(product, softmax)

    @property
    def _copies(self) -> bool:
        return self.itemsize < _FLOAT32_BYTES
