"""FLOPs and bytes of attention in one layer, and of DeepSeek's indexers and compressors, which choose its keys.

`caches` and `kernels` have what its execution adds.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiler.counting.caches import Cache, cache_of
from profiler.counting.kernels import Call, Cost, causal_pairs, chunked_pairs, eager, fused, math, read_again
from profiler.counting.operators import Operator, OperatorGroup
from profiler.facts.operators import Cause
from profiler.facts.step import FLOAT32_BYTES, UNFUSED_KERNEL, Count, ExecutionPath, Heads, Step, Work

SOFTMAX_FLOPS_PER_SCORE = 5
"""The maximum, subtraction, exponential, sum and division."""


@dataclass(frozen=True)
class AttentionCore(Operator):
    """softmax(Q K^T) V of one layer, including its KV cache."""

    group: OperatorGroup = field(default="attention", kw_only=True)
    query_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: int | None = None
    """Keys that a query may see, including itself; None means all."""
    chunked: bool = False
    """Whether they are those of the query's own chunk of so many tokens, instead of the last ones (Llama 4)."""
    caches_all: bool = False
    """Whether the cache keeps the keys that a window hides, too (GPT-Neo)."""
    latent_dim: int | None = None
    """Elements per token of a cached latent, which replaces the K and V heads (MLA)."""
    top_k: int | None = None
    """Keys that an indexer chooses for a query; None means all."""
    keeps: bool = True
    """Whether the layer keeps its keys and values; if not, it reads those of another one."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element of Q, K and V."""
        return int(self.dtype.itemsize)

    @property
    def cached_elements(self) -> int:
        """Elements per token in the cache that this layer reads."""
        return self.latent_dim if self.latent_dim is not None else self.kv_heads * (self.qk_dim + self.v_dim)

    def cache(self, path: ExecutionPath) -> Cache:
        return cache_of(path, self.itemsize, None if self.caches_all else self.window)

    def seen_keys(self, tokens: Count) -> Any:
        """Return how many of `tokens` in the cache the next one may see."""
        if self.window is None:
            return tokens
        return tokens % self.window if self.chunked else np.minimum(tokens, self.window - 1)

    def pairs(self, step: Step) -> Any:
        """Return the (query, key) pairs per sequence."""
        if self.chunked and self.window is not None:
            return chunked_pairs(step.query, step.context, self.window)
        return causal_pairs(step.query, step.context, self.top_k or self.window)

    def masked(self, step: Step, path: ExecutionPath) -> Any:
        """Return whether transformers passes a mask to the kernel of `sdpa` instead of the causal flag.

        It does so if a window hides cached keys, for several new tokens after a cache, for every decode step with a
        static cache (masking_utils.py, `_ignore_causal_mask_sdpa` and `create_causal_mask`, 5.23), and if a prompt of
        the batch is padded.
        """
        cache = self.cache(path)
        partly = np.where(np.greater(step.query, 1), np.greater(step.context, 0), cache.has_slots)
        hidden = self.window is not None and np.greater_equal(cache.keys(step), self.window)
        return partly | hidden | path.masks

    def cost(self, step: Step, path: ExecutionPath) -> Cost:
        """Return what transformers' call takes in a step; of several steps, some may have a mask and others none."""
        cache, width = self.cache(path), self.qk_dim
        if path.attention == "eager":
            return eager(self._call(step, cache.keys(step), "repeated", masked=True))
        masked = self._call(step, cache.keys(step), path.masked_heads.get(width), masked=True)
        # Without a mask, transformers cuts off the slots that hold no token.
        filled = cache.live(step.context) + step.query
        unmasked = self._call(step, filled, path.heads.get(width, "grouped"), masked=False)
        costs = (_sdpa(path.masked_kernel, masked), _sdpa(path.kernel, unmasked))
        is_masked, amounts = self.masked(step, path), zip(*(vars(cost).values() for cost in costs), strict=True)
        return Cost(*(np.where(is_masked, *either) for either in amounts))

    def _call(self, step: Step, keys: Any, heads: Heads | None, *, masked: bool) -> Call:
        """Return the call with `heads`; None: as transformers passes them with a mask by default (`masked_heads`)."""
        several_groups = self.query_heads > self.kv_heads
        repeated = (np.greater(step.query, 1) if heads is None else heads == "repeated") & several_groups
        repeats = self.query_heads // self.kv_heads if heads == "grouped" else 1
        return Call(self, step, keys, masked, repeated, repeats)

    def kept_bytes(self, tokens: Count, path: ExecutionPath | None = None, *, shared: Count = 0) -> Any:
        """Return the bytes of a sequence's keys and values in the cache of a path."""
        if not self.keeps:
            return 0
        cache, own = self.cache(path or ExecutionPath()), tokens - shared
        return self.cached_elements * cache.stored_bytes(np.minimum(cache.live(tokens), own) if cache.window else own)

    def each(self, step: Step, path: ExecutionPath) -> Work:
        cache, cost = self.cache(path), self.cost(step, path)
        flops_per_pair = 2 * self.query_heads * (self.qk_dim + self.v_dim)
        pairs = step.batch * self.pairs(step)
        seen = self.seen_keys(step.context)
        chosen = seen if self.top_k is None else np.minimum(seen, step.query * self.top_k)
        shared = step.shared if self.window is None else np.maximum(step.shared - (step.context - seen), 0)
        again = read_again(step, shared, seen - chosen)
        again_bytes = again * self.cached_elements * self.itemsize
        elements = step.batch * self.cached_elements
        by_heads = pairs * flops_per_pair
        needed = self._needed_flops(by_heads, pairs, step.batch * chosen - again)
        return Work(
            model_flops=needed,
            vector_flops=SOFTMAX_FLOPS_PER_SCORE * self.query_heads * pairs,
            kv_read_bytes=elements * cache.stored_bytes(chosen) - again_bytes,
            kv_write_bytes=elements * cache.written_bytes(step) if self.keeps else 0,
            activation_bytes=step.tokens * self.query_heads * (self.qk_dim + self.v_dim) * self.itemsize,
            redundant_flops={
                Cause.MASKED_SCORES: (step.batch * cost.pairs - pairs) * flops_per_pair,
                Cause.LATENT_EXPANDED: by_heads - needed,  # negative: `kv_b_proj` counts the expansion
            },
            redundant_bytes={**self._redundant_bytes(step, cache, cost), Cause.SHARED_READS: again_bytes},
        )

    def _needed_flops(self, by_heads: Any, pairs: Any, cached_tokens: Any) -> Any:
        """Return the FLOPs of the algorithm; `by_heads` are those of `pairs` if each head has its own keys."""
        return by_heads

    def _redundant_bytes(self, step: Step, cache: Cache, cost: Cost) -> dict[Cause, Count]:
        """Return the traffic beyond reading the live cache once and writing the new tokens once, by cause."""
        elements = step.batch * self.cached_elements
        token_bytes = elements * self.itemsize
        live = cache.live(step.context)
        bytes_: dict[Cause, Count] = {}
        if cache.has_slots:
            bytes_[Cause.UNFILLED_SLOTS] = (cost.keys - live - step.query) * token_bytes
        if self.top_k is not None:
            bytes_[Cause.UNCHOSEN_KEYS] = np.maximum(live - step.query * self.top_k, 0) * token_bytes
        if self.chunked or self.caches_all:
            bytes_[Cause.MASKED_SCORES] = (live - self.seen_keys(step.context)) * token_bytes
        if self.keeps:
            bytes_ |= {cause: elements * moved for cause, moved in cache.moved_bytes(step).items()}
        bytes_ |= self._head_bytes(step, cache, cost)
        bytes_[Cause.ATTENTION_MATRIX] = cost.traffic_bytes
        return bytes_

    def _head_bytes(self, step: Step, cache: Cache, cost: Cost) -> dict[Cause, Count]:
        return {Cause.REPEATED_HEADS: cost.repeating_bytes} if self.query_heads > self.kv_heads else {}


@dataclass(frozen=True)
class LatentCore(AttentionCore):
    """Attention to a latent per token, which transformers expands to heads for the whole context in each step (MLA)."""

    expanded_dim: int = field(kw_only=True)
    """Elements per head of an expanded token."""

    def _needed_flops(self, by_heads: Any, pairs: Any, cached_tokens: Any) -> Any:
        """Return the FLOPs of the cheaper method.

        DeepSeek-V2 (arXiv:2405.04434, section 2.1.2): either the cached latents are expanded to heads first, or the
        expansion is absorbed into query and output. With absorption, each pair is a dot product with the latent and
        its rotary part, and one with the latent. The absorbed matrices cost as much on new tokens as their expansion,
        which the linear `kv_b_proj` counts. Both methods read only the latents.
        """
        rotary = self.qk_dim - (self.expanded_dim - self.v_dim)
        rank = self.cached_elements - rotary
        expanding = cached_tokens * 2 * rank * self.query_heads * self.expanded_dim
        absorbed = pairs * 2 * self.query_heads * (self.cached_elements + rank)
        return np.minimum(by_heads + expanding, absorbed)

    def _head_bytes(self, step: Step, cache: Cache, cost: Cost) -> dict[Cause, Count]:
        expanded, moved = cache.keys(step) * self.expanded_dim, 2 * cost.keys * (self.qk_dim + self.v_dim)
        return {Cause.LATENT_EXPANDED: step.batch * self.query_heads * (expanded + moved) * self.itemsize}


def _sdpa(kernel: str, call: Call) -> Cost:
    return math(call) if kernel == UNFUSED_KERNEL else fused(call)


@dataclass(frozen=True)
class Indexer(Operator):
    """The scores that choose keys or blocks: ReLU(q k) of narrow heads, summed (DeepSeek-V3.2, arXiv:2512.02556)."""

    group: OperatorGroup = field(default="attention", kw_only=True)
    heads: int
    head_dim: int
    itemsize: int
    rate: int = 1
    """Tokens per score."""
    weighted: bool = True
    """Whether the heads are added up with weights of their own, in a matmul."""
    kept_elements: int = 0
    """Elements that it keeps per token; 0 if a `Compressor` keeps its keys."""

    def each(self, step: Step, path: ExecutionPath) -> Work:
        flops_per_pair = 2 * self.heads * (self.head_dim + self.weighted)
        pairs = causal_pairs(step.query, step.context, rate=self.rate)
        scored = pairs if self._by_query else step.query * ((step.context + step.query) // self.rate)
        again_bytes = self.kept_bytes(read_again(step, step.shared))
        return Work(
            model_flops=step.batch * pairs * flops_per_pair,
            kv_read_bytes=step.batch * self.kept_bytes(step.context) - again_bytes,
            kv_write_bytes=step.batch * self.kept_bytes(step.query),
            redundant_flops={Cause.MASKED_SCORES: step.batch * (scored - pairs) * flops_per_pair},
            redundant_bytes={Cause.SHARED_READS: again_bytes},
        )

    @property
    def _by_query(self) -> bool:
        """Whether scores run query by query, as those of blocks of kept keys; all others cover later keys too."""
        return self.rate > 1 and self.kept_elements == self.head_dim

    def scratch_bytes(self, step: Step) -> Any:
        """Return the peak bytes of the scores of one layer, and of their copy from ReLU or scale, in float32."""
        queries = step.batch if self._by_query else step.tokens
        return 2 * FLOAT32_BYTES * queries * self.heads * ((step.context + step.query) // self.rate)

    def kept_bytes(self, tokens: Count, path: ExecutionPath | None = None, *, shared: Count = 0) -> Any:
        return (tokens - shared) * (self.kept_elements * self.itemsize)


@dataclass(frozen=True)
class Compressor(Operator):
    """Keys that each stand for `rate` tokens, and the inputs of those that are not complete.

    DeepSeek-V4 (transformers 5.23, `DeepseekV4HCACache`, `DeepseekV4CSACache`): a gated mean over one or two blocks.
    """

    group: OperatorGroup = field(default="attention", kw_only=True)
    width: int
    """Elements of a key, which is also its value."""
    rate: int
    series: int
    """1, or 2 if the blocks overlap."""
    query_heads: int = 0
    """Heads that attend to the keys; 0 for those of an indexer."""
    top_k: int | None = None
    """Keys that an indexer chooses for a query; None means all."""

    def each(self, step: Step, path: ExecutionPath) -> Work:
        pairs = causal_pairs(step.query, step.context, self.top_k, rate=self.rate)
        entries = (step.context + step.query) // self.rate
        blocks = read = step.context // self.rate
        if self.top_k is not None:
            read = np.minimum(read, step.query * self.top_k)
        again = read_again(step, step.shared // self.rate, 0 if self.top_k is None else blocks - read)
        again_bytes = again * self.width * self.dtype.itemsize
        # A new token's value and gate wait for their block; a later step reads those that wait.
        waiting = 2 * self.series * np.minimum(step.query, self.rate)
        read = read + np.where(np.greater(step.context, 0), waiting, 0)
        written = entries - step.context // self.rate + waiting
        flops_per_pair = 4 * self.query_heads * self.width
        return Work(
            model_flops=step.batch * pairs * flops_per_pair,
            kv_read_bytes=step.batch * read * self.width * self.dtype.itemsize - again_bytes,
            kv_write_bytes=step.batch * written * self.width * self.dtype.itemsize,
            redundant_flops={Cause.MASKED_SCORES: step.batch * (step.query * entries - pairs) * flops_per_pair},
            redundant_bytes={Cause.SHARED_READS: again_bytes},
        )

    def kept_bytes(self, tokens: Count, path: ExecutionPath | None = None, *, shared: Count = 0) -> Any:
        entries = tokens // self.rate
        waiting = 2 * self.series * (tokens - entries * self.rate)  # values and gates
        overlap = 2 * (self.series - 1) * self.rate * np.minimum(entries, 1)
        return (entries + waiting + overlap) * self.width * self.dtype.itemsize - self.shared_bytes(shared)

    def shared_bytes(self, shared: Count) -> Any:
        return shared // self.rate * self.width * self.dtype.itemsize
