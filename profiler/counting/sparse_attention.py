"""FLOPs and bytes of attention to chosen or compressed keys: DeepSeek's indexers and compressors."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiler.counting.kernels import causal_pairs, read_again
from profiler.counting.operators import Operator, OperatorGroup
from profiler.facts.operators import Cause
from profiler.facts.step import FLOAT32_BYTES, Count, ExecutionPath, Step, Work


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
