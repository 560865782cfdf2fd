"""FLOPs and bytes of attention: causal pairs, windows, latent heads, and the math kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiler.counting.operators import Operator, OperatorGroup
from profiler.facts.cache_format import CacheFormat
from profiler.facts.operators import Cause
from profiler.facts.step import Count, ExecutionPath, Heads, Step, Work

SOFTMAX_FLOPS_PER_SCORE = 5
"""The maximum, subtraction, exponential, sum and division."""

_FLOAT32_BYTES = 4


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
    expanded_dim: int | None = None
    """Elements per head after the latent of the whole context is expanded in each step (MLA in transformers)."""
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

    @property
    def cache_window(self) -> int | None:
        """Keys that the cache keeps for a query, including its own; None means all."""
        return None if self.caches_all else self.window

    def live(self, tokens: Count) -> Any:
        """Return how many of `tokens` the cache holds for the next one, which completes its window."""
        return tokens if self.cache_window is None else np.minimum(tokens, self.cache_window - 1)

    def seen_keys(self, tokens: Count) -> Any:
        """Return how many of `tokens` in the cache the next one may see."""
        if self.window is None:
            return tokens
        return tokens - tokens // self.window * self.window if self.chunked else np.minimum(tokens, self.window - 1)

    def pairs(self, step: Step) -> Any:
        """Return the (query, key) pairs per sequence."""
        if self.chunked and self.window is not None:
            return chunked_pairs(step.query, step.context, self.window)
        return causal_pairs(step.query, step.context, self.top_k or self.window)

    def kept_bytes(
        self, tokens: Count, stored: CacheFormat | None = None, newest: Count = 0, *, shared: Count = 0
    ) -> Any:
        """Return the bytes of a sequence's keys and values; all but the `newest` tokens are as `stored`."""
        if not self.keeps:
            return 0
        cached = tokens - shared if self.cache_window is None else np.minimum(self.live(tokens), tokens - shared)
        return self._stored_bytes(cached, stored, newest)

    def shared_bytes(self, shared: Count) -> Any:
        return self.kept_bytes(shared)

    def each(self, step: Step, path: ExecutionPath) -> Work:
        flops_per_pair = 2 * self.query_heads * (self.qk_dim + self.v_dim)
        pairs = step.batch * self.pairs(step)
        executed_pairs = step.batch * self._executed_pairs(step, path)
        live, seen = self.live(step.context), self.seen_keys(step.context)
        chosen = seen if self.top_k is None else np.minimum(seen, step.query * self.top_k)
        unchosen = 0 if self.top_k is None else seen - chosen
        shared = step.shared if self.window is None else np.maximum(step.shared - (step.context - seen), 0)
        again = read_again(step, shared, unchosen)
        again_bytes = again * self.cached_elements * self.itemsize
        by_heads = pairs * flops_per_pair
        read_bytes = step.batch * self._stored_bytes(chosen, path.cache_format, path.residual_tokens)
        needed = self._needed_flops(by_heads, pairs, step.batch * chosen - again)
        return Work(
            model_flops=needed,
            vector_flops=SOFTMAX_FLOPS_PER_SCORE * self.query_heads * pairs,
            kv_read_bytes=read_bytes - again_bytes,
            kv_write_bytes=step.batch * self._written_bytes(step, path) if self.keeps else 0,
            activation_bytes=step.tokens * self.query_heads * (self.qk_dim + self.v_dim) * self.itemsize,
            avoidable_flops={
                Cause.MASKED_SCORES: (executed_pairs - pairs) * flops_per_pair,
                Cause.LATENT_EXPANDED: by_heads - needed,  # negative: `kv_b_proj` counts the expansion
            },
            avoidable_bytes={**self._avoidable_bytes(step, path, live), Cause.SHARED_READS: again_bytes},
        )

    def _stored_bytes(self, tokens: Any, stored: CacheFormat | None, newest: Count) -> Any:
        """Return the bytes of a sequence's `tokens` in the cache: the newest in the model's dtype, others as stored."""
        if stored is None:
            return tokens * self.cached_elements * self.itemsize
        packed_bytes = (tokens - newest) * stored.element_bytes(self.itemsize)
        return self.cached_elements * (packed_bytes + newest * self.itemsize)

    def _written_bytes(self, step: Step, path: ExecutionPath) -> Any:
        """Return the bytes of a sequence's new tokens as cached; after a prompt, some caches keep them as they are."""
        elements, stored = step.query * self.cached_elements, path.cache_format
        if stored is None:
            return elements * self.itemsize
        kept = np.greater(step.context, 0) & (stored.residual_tokens > 0)
        return np.where(kept, elements * self.itemsize, elements * stored.element_bytes(self.itemsize))

    def _needed_flops(self, by_heads: Any, pairs: Any, cached_tokens: Any) -> Any:
        """Return the FLOPs of the algorithm; for a cache of latents, those of the cheaper method.

        DeepSeek-V2 (arXiv:2405.04434, section 2.1.2): either the cached latents are expanded to heads first, or the
        expansion is absorbed into query and output. With absorption, each pair is a product with the latent and its
        rotary part, and one with the latent. The absorbed matrices cost as much on new tokens as their expansion,
        which the linear `kv_b_proj` counts. Both methods read only the latents.
        """
        if self.latent_dim is None or self.expanded_dim is None:
            return by_heads
        rotary = self.qk_dim - (self.expanded_dim - self.v_dim)
        rank = self.latent_dim - rotary
        expanding = cached_tokens * 2 * rank * self.query_heads * self.expanded_dim
        absorbed = pairs * 2 * self.query_heads * (self.latent_dim + rank)
        return np.minimum(by_heads + expanding, absorbed)

    def _cache_keys(self, step: Step, path: ExecutionPath) -> Any:
        """Return the keys per sequence that the cache returns, including the new ones."""
        if path.cache == "static":
            slots = self._slots(path)
            return np.maximum(slots, np.minimum(step.context, slots - 1) + step.query)
        return self.live(step.context) + step.query

    def _kernel_keys(self, step: Step, path: ExecutionPath) -> Any:
        """Return the keys that the kernel multiplies: without a mask, `sdpa` cuts off the empty slots of a prompt."""
        keys = self._cache_keys(step, path)
        if path.cache != "static" or path.attention == "eager":
            return keys
        return np.where(self.masked(step, path), keys, step.query)

    def _slots(self, path: ExecutionPath) -> Any:
        """Return this layer's slots in a static cache, capped by the window (`StaticSlidingWindowLayer`)."""
        window = self.cache_window
        return path.static_cache_len if window is None else np.minimum(path.static_cache_len, window)

    def _copied_slots(self, step: Step, path: ExecutionPath) -> Any:
        """Return the tokens whose K and V the cache reads and writes again while it takes in new ones.

        A dynamic cache concatenates (`DynamicLayer.update`). A static cache with a full window rolls all its slots for
        a single token and copies them back. For several tokens it concatenates, and copies the last ones back.
        """
        keys = self._cache_keys(step, path)
        if path.cache == "dynamic":
            return keys
        slots, one = self._slots(path), np.equal(step.query, 1)
        joined = np.where(np.greater(step.context, 0), keys, 0)
        return np.where(step.context + step.query > slots, slots + np.where(one, slots, joined), 0)

    def masked(self, step: Step, path: ExecutionPath) -> Any:
        """Return whether transformers passes a mask to the kernel of `sdpa` instead of the causal flag.

        It does so if a window hides cached keys, for several new tokens after a cache, for every decode step with a
        static cache (masking_utils.py, `_ignore_causal_mask_sdpa` and `create_causal_mask`, 5.23), and if a prompt of
        the batch is padded.
        """
        keys = self._cache_keys(step, path)
        several = np.greater(step.query, 1)
        past = (several & np.greater(step.context, 0)) | (~several & (path.cache == "static"))
        unwindowed = past | path.masks
        return unwindowed if self.window is None else np.greater_equal(keys, self.window) | unwindowed

    def _executed_pairs(self, step: Step, path: ExecutionPath) -> Any:
        full = step.query * self._kernel_keys(step, path)
        if path.attention == "eager" or not path.fused:
            return full
        return np.where(self.masked(step, path), full, causal_pairs(step.query, step.context, self.window))

    def _passes_as(self, heads: Heads, step: Step, path: ExecutionPath) -> Any:
        """Return whether transformers passes grouped heads to the kernel of `sdpa` in the form `heads`."""
        masked = path.masked_heads.get(self.qk_dim)
        several = np.greater(step.query, 1)
        with_mask = np.where(several, heads == "repeated", heads == "packed") if masked is None else masked == heads
        without = path.heads.get(self.qk_dim, "grouped") == heads
        return np.where(self.masked(step, path), with_mask, without) & (self.query_heads > self.kv_heads)

    def _repeats_heads(self, step: Step, path: ExecutionPath) -> Any:
        """Return whether transformers repeats K and V per query head before the kernel; eager attention always does."""
        if path.attention == "eager":
            return self.query_heads > self.kv_heads
        return self._passes_as("repeated", step, path)

    def _runs_math(self, step: Step, path: ExecutionPath) -> Any:
        """Return whether `sdpa` has no fused kernel for the step."""
        return np.where(self.masked(step, path), not path.fused_masked, not path.fused) & (path.attention != "eager")

    def _math_kernel(self, step: Step, path: ExecutionPath) -> MathKernel:
        keys = self._kernel_keys(step, path)
        cached = step.batch * keys * np.where(self._repeats_heads(step, path), self.query_heads, self.kv_heads)
        queries = step.tokens * self.query_heads
        return MathKernel(
            itemsize=self.itemsize,
            q=queries * self.qk_dim,
            k=cached * self.qk_dim,
            v=cached * self.v_dim,
            repeats=np.where(self._passes_as("grouped", step, path), self.query_heads // self.kv_heads, 1),
            outputs=queries * self.v_dim,
            scores=queries * keys,
            mask=step.tokens * keys,
            masked=self.masked(step, path) | np.greater(step.query, 1),
        )

    def _avoidable_bytes(self, step: Step, path: ExecutionPath, live: Count) -> dict[Cause, Count]:
        """Return the traffic beyond reading the live cache once and writing the new tokens once, by cause.

        From the source of transformers 5.23. Tokens that a cache copies are read and written before the kernel reads
        them. A static cache is read to its last slot, except by `sdpa` without a mask, which gets only the prompt's
        slots. `repeat_kv` writes K and V once per query head and reads them; the math kernel does so itself if heads
        reach it grouped. An unfused kernel writes its scores to memory.
        """
        token_bytes = step.batch * self.cached_elements * self.itemsize
        keys = self._cache_keys(step, path)
        bytes_: dict[Cause, Count] = {}
        if path.cache == "static":
            read = np.equal(step.query, 1) | self.masked(step, path) | (path.attention == "eager")
            empty = np.maximum(keys - live - step.query, 0)
            bytes_[Cause.UNFILLED_SLOTS] = np.where(read, empty, 0) * token_bytes
        if self.top_k is not None:
            bytes_[Cause.UNCHOSEN_KEYS] = np.maximum(live - step.query * self.top_k, 0) * token_bytes
        if self.chunked or self.caches_all:
            bytes_[Cause.MASKED_SCORES] = (live - self.seen_keys(step.context)) * token_bytes
        window = self.cache_window
        if self.keeps and (path.cache == "dynamic" or (path.cache == "static" and window is not None)):
            copied_bytes = 2 * self._copied_slots(step, path) * token_bytes
            rolls: Any = False
            if window is not None:  # a prefill has no full window yet, and a static cache copies nothing else
                full = np.greater(step.context + step.query, window)
                rolls = full if path.cache == "static" else full & np.greater(step.context, 0)
            bytes_[Cause.CACHE_COPIES] = np.where(rolls, 0, copied_bytes)
            bytes_[Cause.ROLLED_WINDOWS] = np.where(rolls, copied_bytes, 0)
        if path.cache_format is not None:
            bytes_ |= self._conversions(step, path, path.cache_format)
        repeated_bytes = 2 * self._repeated_bytes(step, path)
        unfused, math = self._runs_math(step, path), self._math_kernel(step, path)
        if self.expanded_dim is not None:
            expanded = step.batch * keys * self.query_heads * self.expanded_dim * self.itemsize
            bytes_[Cause.LATENT_EXPANDED] = expanded + repeated_bytes
        elif self.query_heads > self.kv_heads:
            outside = np.where(self._repeats_heads(step, path), repeated_bytes, 0)
            bytes_[Cause.REPEATED_HEADS] = outside + np.where(unfused, math.repeated_bytes, 0)
        if path.attention == "eager":
            upcast = 2 * _FLOAT32_BYTES if self.itemsize < _FLOAT32_BYTES else 0
            bytes_[Cause.ATTENTION_MATRIX] = math.scores * (4 * self.itemsize + upcast)
        else:
            bytes_[Cause.ATTENTION_MATRIX] = np.where(unfused, math.traffic_bytes, 0)
        return bytes_

    def _conversions(self, step: Step, path: ExecutionPath, stored: CacheFormat) -> dict[Cause, Count]:
        """Return the traffic of a quantised cache in a step after a prompt, by cause (cache_utils.py, 5.23).

        A cache in groups converts what is packed, concatenates it with the newest tokens, and these with the new one
        (`QuantizedLayer.update`). fp8 concatenates what is stored and converts all of it (`Fp8QuantizedLayer.update`).
        The attention kernel then reads all tokens in the model's dtype.
        """
        wide, element_bytes = self.itemsize, stored.element_bytes(self.itemsize)
        newest = path.residual_tokens + step.query
        tokens = step.context + step.query
        packed = tokens - newest if stored.residual_tokens else tokens
        copied_bytes = tokens * wide + 3 * newest * wide if stored.residual_tokens else 2 * tokens * element_bytes
        later = step.batch * self.cached_elements * np.greater(step.context, 0)
        return {
            Cause.CACHE_COPIES: later * copied_bytes,
            Cause.CACHE_CONVERSION: later * packed * (element_bytes + stored.conversion_bytes(wide)),
            Cause.CONVERTED_READS: later * packed * (wide - element_bytes),
        }

    def _repeated_bytes(self, step: Step, path: ExecutionPath) -> Any:
        """Return the bytes of K and V repeated per query head."""
        elements = step.batch * self._kernel_keys(step, path) * self.query_heads * (self.qk_dim + self.v_dim)
        return elements * self.itemsize

    def scratch_bytes(self, step: Step, path: ExecutionPath) -> Any:
        """Return the peak bytes of one layer's attention besides Q, K, V, its cache and its result.

        These are repeated heads and the buffers of an unfused kernel. Eager attention has its scores in the model's
        dtype, for 16 bits a float32 copy as the input of the softmax, and the float32 output of the softmax.
        """
        repeated = np.where(self._repeats_heads(step, path), self._repeated_bytes(step, path), 0)
        math = self._math_kernel(step, path)
        if path.attention == "eager":
            copies = 2 if self.itemsize < _FLOAT32_BYTES else 1
            return repeated + math.scores * (self.itemsize + copies * _FLOAT32_BYTES)
        return repeated + np.where(self._runs_math(step, path), math.scratch_bytes, 0)


@dataclass(frozen=True)
class Indexer(Operator):
    """The scores by which sparse attention chooses keys: ReLU(q k) of a few narrow heads, and their weighted sum.

    DeepSeek-V3.2 (arXiv:2512.02556, section 2.1). It scores every token, or every block of `rate` tokens.
    """

    group: OperatorGroup = field(default="attention", kw_only=True)
    heads: int
    head_dim: int
    itemsize: int
    rate: int = 1
    """Tokens per score."""
    weighted: bool = True
    """Whether the heads are added up with weights of their own, in a product."""
    kept_elements: int = 0
    """Elements that it keeps per token; 0 if a `Compressor` keeps its keys."""

    def each(self, step: Step, path: ExecutionPath) -> Work:
        flops_per_pair = 2 * self.heads * (self.head_dim + self.weighted)
        pairs = compressed_pairs(step.query, step.context, self.rate)
        scored = pairs if self._by_query else step.query * ((step.context + step.query) // self.rate)
        again_bytes = self.kept_bytes(read_again(step, step.shared))
        return Work(
            model_flops=step.batch * pairs * flops_per_pair,
            kv_read_bytes=step.batch * self.kept_bytes(step.context) - again_bytes,
            kv_write_bytes=step.batch * self.kept_bytes(step.query),
            avoidable_flops={Cause.MASKED_SCORES: step.batch * (scored - pairs) * flops_per_pair},
            avoidable_bytes={Cause.SHARED_READS: again_bytes},
        )

    @property
    def _by_query(self) -> bool:
        """Whether scores run query by query, as those of blocks of kept keys; all others cover later keys too."""
        return self.rate > 1 and self.kept_elements == self.head_dim

    def scratch_bytes(self, step: Step) -> Any:
        """Return the peak bytes of the scores of one layer, and of their copy from ReLU or scale, in float32."""
        queries = step.batch if self._by_query else step.tokens
        return 2 * _FLOAT32_BYTES * queries * self.heads * ((step.context + step.query) // self.rate)

    def kept_bytes(self, tokens: Count, *, shared: Count = 0) -> Any:
        return (tokens - shared) * (self.kept_elements * self.itemsize)

    def shared_bytes(self, shared: Count) -> Any:
        return self.kept_bytes(shared)


@dataclass(frozen=True)
class Compressor(Operator):
    """Keys that each stand for `rate` tokens, and the inputs of those that are not complete.

    Compressed attention of DeepSeek-V4 (transformers 5.23, models/deepseek_v4: `DeepseekV4HCACache` and
    `DeepseekV4CSACache`): a gated mean over a block, which overlaps the block before if it has two series.
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
        pairs = compressed_pairs(step.query, step.context, self.rate, self.top_k)
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
            avoidable_flops={Cause.MASKED_SCORES: step.batch * (step.query * entries - pairs) * flops_per_pair},
            avoidable_bytes={Cause.SHARED_READS: again_bytes},
        )

    def kept_bytes(self, tokens: Count, *, shared: Count = 0) -> Any:
        entries = tokens // self.rate
        waiting = 2 * self.series * (tokens - entries * self.rate)  # values and gates
        overlap = 2 * (self.series - 1) * self.rate * np.minimum(entries, 1)
        return (entries + waiting + overlap) * self.width * self.dtype.itemsize - self.shared_bytes(shared)

    def shared_bytes(self, shared: Count) -> Any:
        return shared // self.rate * self.width * self.dtype.itemsize


def read_again(step: Step, shared: Any, unchosen: Any = 0) -> Any:
    """Return the cached tokens that a kernel reads again for each further sequence, though `shared` are the same ones.

    A plain attention kernel reads every sequence's cache; kernels that read a shared prefix once exist (Hydragen,
    arXiv:2402.05099, section 3). Of each cache `unchosen` tokens are not read; the others are as different as possible.
    """
    return np.maximum((step.batch - 1) * shared - step.batch * unchosen, 0)


def compressed_pairs(query: Count, context: Count, rate: int, top_k: int | None = None) -> Any:
    """Return the (query, block) pairs per sequence: a query sees the complete blocks up to itself, at most `top_k`.

    The sum over i = 1..query of min((context + i) // rate, top_k).
    """

    def up_to(tokens: Any) -> Any:
        limit = tokens if top_k is None else np.minimum(tokens, top_k * rate)
        blocks = limit // rate
        whole = rate * (blocks * (blocks - 1) // 2) + blocks * (limit - blocks * rate + 1)
        return whole if top_k is None else whole + (tokens - limit) * top_k

    return up_to(context + query) - up_to(context)


def causal_pairs(query: Count, context: Count, window: int | None = None) -> Any:
    """Return the (query, key) pairs per sequence of causal attention: a query sees the cache, its past and itself.

    The sum over i = 1..query of min(context + i, window). Raises ValueError for a window below 1.
    """
    if window is None:
        return query * context + query * (query + 1) // 2
    if window < 1:
        raise ValueError(f"a sliding window must have at least 1 key, not {window}")
    free = np.clip(window - np.asarray(context), 0, query)  # queries below the limit of the window
    return free * context + free * (free + 1) // 2 + (query - free) * window


def chunked_pairs(query: Count, context: Count, chunk: int) -> Any:
    """Return the (query, key) pairs per sequence where a query sees its own chunk's past and itself.

    The sum over i = context..context + query - 1 of i mod chunk + 1 (transformers 5.23, `chunked_overlay`).
    """

    def up_to(tokens: Any) -> Any:
        whole = tokens // chunk
        rest = tokens - whole * chunk
        return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2

    return up_to(context + query) - up_to(context)


_BOOL_BYTES = 1


@dataclass(frozen=True)
class MathKernel:
    """One call of `_scaled_dot_product_attention_math` (torch 2.13, aten/src/ATen/native/transformers/attention.cpp).

    Sizes are numbers of elements. The kernel computes in float32: it copies 16-bit Q, K and V, and the result. It
    repeats grouped heads of K and V, and multiplies Q and K by the square root of the scale.
    """

    itemsize: int
    """Bytes of an element of Q, K, V and the result."""
    q: Any
    k: Any
    v: Any
    repeats: Any
    """How often K and V are repeated: query heads per KV head."""
    outputs: Any
    scores: Any
    mask: Any
    """Scores of one head; all heads share the mask."""
    masked: Any
    """Whether the kernel adds a mask to the scores; without an argument it makes a causal mask itself."""

    @property
    def repeated_bytes(self) -> Any:
        """Traffic of the repeated K and V: written and read."""
        return np.where(self.repeats > 1, 2 * _FLOAT32_BYTES * self.repeats * (self.k + self.v), 0)

    @property
    def traffic_bytes(self) -> Any:
        """Further traffic beyond that of a fused kernel, which reads Q, K and V and writes the result.

        The first product writes a score, the mask is added in place, the softmax reads and writes it, and the second
        product reads it. `_safe_softmax` also looks for fully masked rows: it reads the score, writes and reads a
        byte, and reads and writes the score again. 16-bit scores are copied too, into an unused result.
        """
        twice = 2 * _FLOAT32_BYTES
        score_bytes = 7 * _FLOAT32_BYTES + 2 * _BOOL_BYTES + np.where(self.masked, twice, 0)
        copied = twice * (self.q + self.k + self.v + self.outputs) + self.scores * (_FLOAT32_BYTES + self.itemsize)
        scaled = twice * (self.q + self.repeats * self.k)
        return scaled + self.scores * score_bytes + (copied if self._copies else 0)

    @property
    def scratch_bytes(self) -> Any:
        """Peak bytes besides Q, K, V and the result.

        Copies, repeated heads, the scaled Q and masks exist until the end. The peak is either at the first product,
        with the scaled K and the scores, or in the softmax, with the scores, its result and a byte for each. Since
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
