"""The attention core: pairs of queries and keys, KV traffic, and what each execution path adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.work.causes import Cause
from profiler.work.operators import Operator
from profiler.work.step import Count, ExecutionPath, Step, Work

SOFTMAX_FLOPS_PER_SCORE = 5
"""Maximum, subtraction, exponential, sum, division."""

_FLOAT32_BYTES = 4
_GROUPED_HEAD_LIMIT = 256


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
    def groups_in_kernel(self) -> bool:
        """Whether transformers leaves grouped heads to `sdpa`'s kernel when there is no mask (`use_gqa_in_sdpa`)."""
        return self.qk_dim == self.v_dim <= _GROUPED_HEAD_LIMIT

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
        full = step.query * self._held(step, path)
        if path.attention == "eager" or not path.fused:
            return full
        return np.where(self.masked(step, path), full, causal_pairs(step.query, step.context, self.window))

    def _repeats_heads(self, step: Step, path: ExecutionPath) -> Any:
        """Whether K and V are written out once a query head, which grouped heads need only for lack of a kernel.

        Eager attention always does. `sdpa` groups them in the kernel when there is no mask and the head is at most
        256 wide (integrations/sdpa_attention.py, `use_gqa_in_sdpa`), and a single query is packed (`pack_gqa`).
        """
        if path.attention == "eager":
            return True
        return (np.asarray(step.query) > 1) & (self.masked(step, path) | (not self.groups_in_kernel))

    def _writes_scores(self, step: Step, path: ExecutionPath) -> Any:
        if path.attention == "eager":
            return True
        return np.where(self.masked(step, path), not path.fused_masked, not path.fused)

    def _avoidable_bytes(self, step: Step, path: ExecutionPath, live: Count) -> dict[Cause, Count]:
        """Traffic beyond reading the live cache once and writing the new tokens once.

        Read in transformers 5.23. What a cache copies is read and written before the kernel reads it. A static one is
        read to its last slot, but by `sdpa` without a mask, which is handed the prompt's own. `repeat_kv` writes K and
        V out once a query head and reads those; an unfused kernel writes its scores out.
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
        groups = self.query_heads // self.kv_heads
        heads_bytes = step.batch * held * self.query_heads * (self.qk_dim + self.v_dim) * self.itemsize
        if self.expanded_dim is not None:
            expanded = step.batch * held * self.query_heads * self.expanded_dim * self.itemsize
            bytes_[Cause.LATENT_EXPANDED] = expanded + 2 * heads_bytes
        elif groups > 1:
            bytes_[Cause.REPEATED_HEADS] = np.where(self._repeats_heads(step, path), 2 * heads_bytes, 0)
        upcast = 2 * _FLOAT32_BYTES if self.itemsize < _FLOAT32_BYTES else 0
        scores = step.tokens * held * self.query_heads
        bytes_[Cause.ATTENTION_MATRIX] = np.where(
            self._writes_scores(step, path), scores * (4 * self.itemsize + upcast), 0
        )
        return bytes_


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
