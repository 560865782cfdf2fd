"""What a cell needs of a device's memory at its peak: weights, KV cache, workspace, and fragmentation.

`data.free_memory` says how much of a device it may take.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.counting.attention import AttentionCore, Indexer
from profiler.counting.operators import Embedding, Experts, Linear, ModelWork
from profiler.data.free_memory import SURE_SHARE
from profiler.facts.step import FLOAT32_BYTES, UNFUSED_KERNEL, Attention, Count, ExecutionPath, Heads, Step

# Tensors of the hidden size during a matmul: the embeddings, the layer's input, its sum and the normalised sum.
_LIVE_HIDDEN = 4
# Tensors of the hidden size during attention: the embeddings, the layer's input and its normalised copy.
_LIVE_HIDDEN_OF_ATTENTION = 3
_LOST_OUTPUTS = 2.5
"""Free memory at the peak that is not in one piece, in outputs of the widest matmul.

torch's allocator takes a segment per large tensor. Tensors that live longer, such as a layer's sum and its cache, are
put into free segments, which then hold no second tensor of the first size and do not return to the driver
(CUDACachingAllocator.cpp, `get_free_block` and `release_cached_blocks`). On simulated GPUs with that allocator, cells
of Mistral-7B end out of memory with up to 2 such outputs free, and run with 2.5."""


def cache_bytes(
    work: ModelWork, batch_size: Count, tokens: Count, path: ExecutionPath | None = None, *, shared: Count = 0
) -> Any:
    """Return the bytes that sequences keep between steps: keys, values, states; the first `shared` tokens once."""
    total: Any = 0
    for operator in work.operators:
        kept = operator.kept_bytes(tokens, path, shared=shared)
        total = total + operator.count * (batch_size * kept + operator.shared_bytes(shared))
    return total


def state_bytes(work: ModelWork) -> int:
    """Return the bytes that a sequence keeps whatever its length: recurrent and convolution states."""
    return int(cache_bytes(work, 1, 0))


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a cell needs at its peak; numbers, or arrays with one per cell."""

    weight_bytes: Any
    """The weights as stored; tied ones count once."""
    cache_bytes: Any
    """The KV cache at its full length, as allocated, and states."""
    workspace_bytes: Any
    """The rest: hidden states, scores of an unfused attention, logits, or a copy of one layer's cache."""
    fragmentation_bytes: Any
    """Free memory that its large tensors may be unable to use, since it is in pieces."""

    @property
    def peak_bytes(self) -> Any:
        """The bytes of all tensors at the peak."""
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes

    @property
    def safe_bytes(self) -> Any:
        """The bytes with which the cell runs, in whatever pieces free memory is."""
        return self.peak_bytes + self.fragmentation_bytes

    def fits(self, room_bytes: float) -> Any:
        """Whether the tensors fit into the bytes that they may take of a device (`data.free_memory`)."""
        return self.peak_bytes <= room_bytes

    def is_tight(self, room_bytes: float) -> Any:
        """Whether the tensors fit, but the cell may run out of memory: it is in pieces, or a little less than known."""
        return (self.peak_bytes <= room_bytes) & (self.safe_bytes > SURE_SHARE * room_bytes)

    def at(self, chosen: NDArray[Any]) -> MemoryNeed:
        """The needs of the cells that `chosen` (bool or int [n]) picks."""
        parts = np.broadcast_arrays(*(getattr(self, item.name) for item in fields(self)))
        return MemoryNeed(*(part[chosen] for part in parts))


def memory_need(
    work: ModelWork,
    weight_bytes: int,
    prefill: Step,
    new_tokens: Count,
    path: ExecutionPath,
    sequences: Count | None = None,
) -> MemoryNeed:
    """Return what a cell needs: its weights, its cache at full length, and the workspace of its `prefill`.

    A prefix that `prefill` shares is cached before, once. All sequences are prefilled in one step, unless there are
    more `sequences` than it has. The peak is in one part of the prefill, or of the last decode step. A dynamic cache
    writes a layer's new cache before it frees the old one, and a quantised one converts a layer. Integers or int64
    arrays.
    """
    sequences = prefill.batch if sequences is None else sequences
    cores, stored = work.of_kind(AttentionCore), path.cache_format
    cached: Any = prefill.context + prefill.query + new_tokens
    newest: Any = np.minimum(new_tokens, stored.residual_tokens) if stored is not None else 0
    kept_bytes = cache_bytes(work, sequences, cached, replace(path, residual_tokens=newest), shared=prefill.shared)
    peaks_bytes = _prefill_peaks(work, prefill, path, sequences)
    last_path = replace(path, static_cache_len=cached)
    last_step = replace(prefill, batch=sequences, query=1, context=cached - 1)
    last_peaks = [core.cost(last_step, last_path).scratch_bytes for core in cores]
    last_peaks += [indexer.scratch_bytes(last_step) for indexer in work.of_kind(Indexer)]
    last_peaks += [bank.gathered_bytes(last_step, last_path) for bank in work.of_kind(Experts)]
    peaks_bytes += [np.where(new_tokens > 0, peak_bytes, 0) for peak_bytes in last_peaks]
    if stored is None:
        kv_bytes = kept_bytes - sequences * state_bytes(work)
        peaks_bytes.append(kv_bytes // max(1, sum(core.count for core in cores if core.keeps)))
    else:
        elements = sequences * cached
        peaks_bytes += [elements * core.cached_elements * stored.workspace_bytes(core.itemsize) for core in cores]
    outputs = [op.weight.out_features for op in _inner_linears(work)]
    outputs += [bank.rows_per_token * max(outs for _, outs in bank.matrices) for bank in work.of_kind(Experts)]
    lost_bytes = _LOST_OUTPUTS * prefill.tokens * max(outputs, default=0) * _itemsize(work)
    return MemoryNeed(weight_bytes, kept_bytes, reduce(np.maximum, peaks_bytes), lost_bytes)


def _prefill_peaks(work: ModelWork, prefill: Step, path: ExecutionPath, sequences: Count) -> list[Any]:
    tokens, cores, itemsize = prefill.tokens, work.of_kind(AttentionCore), _itemsize(work)
    widths = [(op.weight.in_features, op.weight.out_features) for op in _inner_linears(work)]
    widest = max((ins + 2 * max(ins, outs) for ins, outs in widths), default=0)
    # A linear may be narrower: those of latents and of embeddings per layer.
    lm_heads = [op for op in work.of_kind(Linear) if op.rows == "last"]
    hidden = max([op.weight.in_features for op in lm_heads] or [op.width for op in work.of_kind(Embedding)], default=0)
    # Eager attention returns its scores, which exist until the layer ends.
    scores = tokens * prefill.query * max((core.query_heads for core in cores), default=0)
    scores_bytes = scores * itemsize if path.attention == "eager" else 0
    peaks_bytes = [tokens * (widest + _LIVE_HIDDEN * hidden) * itemsize + scores_bytes]
    for bank in work.of_kind(Experts):
        live = bank.rows_per_token * bank.row_elements + _LIVE_HIDDEN * bank.matrices[0][0]
        peaks_bytes.append(tokens * live * itemsize + scores_bytes)
    held = 0
    for core in cores:
        queries, keys = core.query_heads * core.qk_dim, core.kv_heads * (core.qk_dim + core.v_dim)
        held = max(held, queries + keys)
        states_bytes = tokens * (_LIVE_HIDDEN_OF_ATTENTION * hidden + queries) * itemsize
        # The keys and values are freed once they are in the cache.
        peaks_bytes.append(states_bytes + np.maximum(tokens * keys * itemsize, core.cost(prefill, path).scratch_bytes))
    for indexer in work.of_kind(Indexer):  # the keys and values of its layer wait for its choice
        live_bytes = tokens * (_LIVE_HIDDEN_OF_ATTENTION * hidden + held) * itemsize
        peaks_bytes.append(live_bytes + indexer.scratch_bytes(prefill))
    logits = (tokens if path.all_logits else sequences) * sum(op.weight.out_features for op in lm_heads)
    return [*peaks_bytes, (tokens * hidden + logits) * itemsize]


def _inner_linears(work: ModelWork) -> list[Linear]:
    return [op for op in work.of_kind(Linear) if op.rows == "tokens"]


def _itemsize(work: ModelWork) -> int:
    return max((op.activation_dtype.itemsize for op in _inner_linears(work)), default=FLOAT32_BYTES)


def need_in_chunks(work: ModelWork, weight_bytes: int, batch: Count, tokens: Count, shared: Count = 0) -> MemoryNeed:
    """Return what a decode step needs on a server, which prefills prompts one by one in chunks, and fuses attention."""
    # llama.cpp prefills so many tokens in one step by default (`n_ubatch`); vLLM takes 2,048 or more.
    last = np.minimum(tokens - shared, 512)
    prefill = Step(1, last, tokens - last, shared)
    grouped: dict[int, Heads] = {core.qk_dim: "grouped" for core in work.of_kind(AttentionCore)}
    return memory_need(work, weight_bytes, prefill, 1, ExecutionPath(masked_heads=grouped), batch)


def path_on(work: ModelWork, attention: Attention, *, fuses_grouped_heads: bool) -> ExecutionPath:
    """Return the path of transformers' `generate` on a GPU that is not here, as far as it decides the workspace.

    Without a mask transformers hands grouped heads to torch's `sdpa`, which needs a fused kernel for them
    (`Datasheet.fuses_grouped_heads`) and 16 bits; else it runs the math kernel, with scores in memory.
    """
    unfused = any(
        core.query_heads > core.kv_heads and not (fuses_grouped_heads and core.itemsize < FLOAT32_BYTES)
        for core in work.of_kind(AttentionCore)
    )
    return ExecutionPath(
        attention=attention,
        kernel=UNFUSED_KERNEL if unfused else "fused",
        all_logits=not work.keeps_last_logits,
        gathers_experts=True,
    )
