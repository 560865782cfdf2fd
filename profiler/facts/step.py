"""The shape of a step, its execution path, and its FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from profiler.facts.cache_format import CacheFormat
from profiler.facts.operators import Cause
from profiler.grid.cells import CellKey

if TYPE_CHECKING:
    import torch

FLOAT32_BYTES = 4
_FLOAT16_BYTES = 2
_INT32_BYTES = 4

# Whole numbers stay exact in int64; only expected values (mixture-of-experts) are floats.
Count = int | float | NDArray[Any]


def plain_number(value: Count) -> int | float:
    """Return a count as a Python number; whole numbers become int."""
    number = float(value)
    return int(value) if number.is_integer() else number


@dataclass(frozen=True)
class Step:
    """One forward pass over `batch` sequences: `query` new tokens each, after `context` cached ones.

    Each is a whole number or an int64 array; arrays broadcast, so a grid is counted at once.
    A prefill has context 0, or that of a cached prefix; a decode step has query 1, or more if it verifies drafts.
    """

    batch: Count
    query: Count
    context: Count
    shared: Count = 0
    """The first of the cached tokens, which all sequences share: they are kept once, and need to be read only once."""
    requested: Count = 1
    """The last of the new tokens, whose logits are requested: one, or all that speculative decoding verifies."""

    def __post_init__(self) -> None:
        for name in ("batch", "query", "context", "shared", "requested"):
            value = np.asarray(getattr(self, name))
            least = 0 if name in ("context", "shared") else 1
            if value.size and (value < least).any():
                raise ValueError(f"a step's {name} must be {least} or more, not {value.min()}")
        if np.any(np.asarray(self.shared) > self.context) or np.any(np.asarray(self.requested) > self.query):
            raise ValueError("a step shares at most its cached tokens, and asks at most for the logits of its new ones")

    @classmethod
    def of(cls, key: CellKey) -> Step:
        """Return the step that a cell's time describes."""
        return cls(key.cell.batch_size, key.query_tokens, key.context_len, key.cell.prefix)

    @property
    def tokens(self) -> Count:
        return self.batch * self.query

    @property
    def last_positions(self) -> Step:
        """The step that runs only the new tokens whose logits are requested, after all others."""
        return replace(self, query=self.requested, context=self.context + self.query - self.requested)


UNFUSED_KERNEL = "math"
Heads = Literal["grouped", "packed", "repeated"]
"""How transformers passes grouped heads to the kernel of `sdpa`: K and V as cached (`grouped`), as cached with the
queries of a group as rows of one head (`packed`), or with K and V written out per query head (`repeated`)."""
CacheKind = Literal["dynamic", "static", "paged", "quantized"]
Attention = Literal["sdpa", "eager", "flash_attention_2", "flex_attention"]


@dataclass(frozen=True)
class ExecutionPath:
    """How the library executes a step; the difference to the algorithm's minimum is redundant work."""

    attention: Attention = "sdpa"
    kernel: str = "fused"
    """The kernel of `sdpa` without a mask; `math` writes its scores out, others skip causally hidden scores."""
    masked_kernel: str = "fused"
    """The kernel of `sdpa` with a mask; it skips nothing."""
    heads: Mapping[int, Heads] = field(default_factory=dict)
    """How `sdpa` gets grouped heads without a mask, by head width; `grouped` by default."""
    masked_heads: Mapping[int, Heads] = field(default_factory=dict)
    """How `sdpa` gets grouped heads with a mask, by head width; by default `packed` for one query, else `repeated`."""
    masks: bool = False
    """True if a mask is passed at every shape, as for a padded batch."""
    cache: CacheKind = "dynamic"
    static_cache_len: int = 0
    """Slots of a static cache; attention reads all of them, filled or not."""
    cache_format: CacheFormat | None = None
    """How a quantised cache stores keys and values; None for other caches."""
    residual_tokens: int = 0
    """The newest tokens of a quantised cache that are still in the model's dtype."""
    all_logits: bool = False
    """True if the LM head runs on every position, though only the last one is needed."""
    upcasts_logits: bool = False
    """True if the last logits are copied to float32 before sampling, as in transformers' `generate`."""
    gathers_experts: bool = False
    """True if decode steps copy the chosen experts' weights (`batched_mm`), as in transformers' `generate` on a GPU."""
    outlier_columns: Mapping[str, float] = field(default_factory=dict)
    """Columns that LLM.int8() multiplies in 16 bits next to its int8 matmul, by operator; they depend on the data."""


@dataclass(frozen=True)
class Work:
    """The work of a step. FLOPs count a multiply-add as 2; bytes are as stored.

    Model work is the algorithm's minimum. `redundant_*` is the excess of the execution path, by cause. Vector FLOPs
    (softmax, norms, rotary, activations, residuals) are separate and do not count towards MFU.
    """

    model_flops: Count = 0
    vector_flops: Count = 0
    weight_bytes: Count = 0
    kv_read_bytes: Count = 0
    kv_write_bytes: Count = 0
    state_bytes: Count = 0
    """Recurrent and convolution states, read and written."""
    embedding_bytes: Count = 0
    logits_bytes: Count = 0
    activation_bytes: Count = 0
    """Operands and intermediates written and read between kernels; an upper bound, since a cache may serve them."""
    link_bytes: Count = 0
    """Messages between ranks: S of nccl-tests, the whole result of each collective; not part of memory traffic."""
    redundant_flops: Mapping[Cause, Count] = field(default_factory=dict)
    redundant_bytes: Mapping[Cause, Count] = field(default_factory=dict)

    @property
    def model_bytes(self) -> Count:
        """Used weights, live KV read and new KV written, each once, plus states, embedding rows and logits."""
        kept = self.kv_read_bytes + self.kv_write_bytes + self.state_bytes
        return self.weight_bytes + kept + self.embedding_bytes + self.logits_bytes

    @property
    def executed_flops(self) -> Count:
        return self.model_flops + sum(self.redundant_flops.values())

    @property
    def executed_bytes(self) -> Count:
        """Bytes that this path moves if no intermediate stays in a cache."""
        return self.model_bytes + self.activation_bytes + sum(self.redundant_bytes.values())

    @property
    def intensity(self) -> Any:
        """Model FLOPs per model byte: the x axis of the roofline."""
        return np.asarray(self.model_flops) / np.asarray(self.model_bytes)

    def __add__(self, other: Work) -> Work:
        mine, theirs = vars(self), vars(other)
        summed: dict[str, Any] = {name: mine[name] + theirs[name] for name in _AMOUNTS}
        for name in _BY_CAUSE:
            causes = {**mine[name], **theirs[name]}
            summed[name] = {cause: mine[name].get(cause, 0) + theirs[name].get(cause, 0) for cause in causes}
        return Work(**summed)

    def __mul__(self, times: Count) -> Work:
        mine = vars(self)
        scaled: dict[str, Any] = {name: mine[name] * times for name in _AMOUNTS}
        causes = {name: {cause: part * times for cause, part in mine[name].items()} for name in _BY_CAUSE}
        return Work(**scaled | causes)


def bytes_by_kind(work: Work) -> dict[str, int | float]:
    """Return model bytes by kind. Activations are 0 by convention, as if on chip; `executed_bytes` counts them."""
    return {
        "weights": plain_number(work.weight_bytes),
        "kv_read": plain_number(work.kv_read_bytes),
        "kv_write": plain_number(work.kv_write_bytes),
        "state": plain_number(work.state_bytes),
        "activations": 0,
        "logits": plain_number(work.logits_bytes),
        "embedding": plain_number(work.embedding_bytes),
        "total": plain_number(work.model_bytes),
    }


_BY_CAUSE = ("redundant_flops", "redundant_bytes")
_AMOUNTS = tuple(item.name for item in fields(Work) if item.name not in _BY_CAUSE)


@dataclass(frozen=True)
class StoredWeight:
    """A weight matrix as stored in memory."""

    format: str
    in_features: int
    out_features: int
    weight_bytes: int
    """Packed weights with scales, absmax, zero points and code books."""
    bias_bytes: int
    compute_dtype: torch.dtype
    """The dtype of the matmul."""
    dense_from_rows: int | None = None
    """Rows (tokens) from which the kernel first writes a dequantised copy and then multiplies; None: never."""
    fused_rows: tuple[tuple[int, int], ...] = ()
    """Ranges of more rows, (first, last), for which the kernel unpacks the weight while it multiplies nevertheless."""

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.weight_bytes / (self.in_features * self.out_features)

    def writes_dense_copy(self, rows: Count) -> NDArray[np.bool_] | bool:
        """Return whether the kernel first writes a dequantised copy, for each number of rows."""
        if self.dense_from_rows is None:
            return False
        dense = np.greater_equal(rows, self.dense_from_rows)
        for first, last in self.fused_rows:
            dense = dense & (np.less(rows, first) | np.greater(rows, last))
        return dense

    def conversion_bytes(self, rows: Count, activations: torch.dtype, outlier_columns: float) -> dict[Cause, Count]:
        """Return the bytes that the kernel moves only to convert between formats, for `rows` tokens, by cause.

        A dense copy of a 4-bit weight is written and read back (`writes_dense_copy`). LLM.int8() casts its input to
        float16, quantises it, and writes its result in int32 before scaling. Columns with outliers are extracted
        from the input and the weight (in int8, float32 and 16 bits), and their product is added to the output.
        Source: bitsandbytes 0.50, autograd/_functions.py, `MatMul8bitLt`; backends/default/ops.py,
        `int8_mixed_scaled_mm`.
        """
        if self.dense_from_rows is not None:
            dense = self.in_features * self.out_features * self.compute_dtype.itemsize
            return {Cause.DEQUANTISATION: np.where(self.writes_dense_copy(rows), 2 * dense, 0)}
        if self.format != "int8":
            return {}
        cast = 0 if str(activations) == "torch.float16" else activations.itemsize + 2 * _FLOAT16_BYTES
        amounts: dict[Cause, Count] = {
            Cause.INT8_INPUTS: rows * self.in_features * (cast + 2),
            Cause.INT32_RESULTS: rows * self.out_features * 2 * _INT32_BYTES,
        }
        if outlier_columns:
            weight_column = self.out_features * (2 + 1 + 2 * FLOAT32_BYTES + 2 * activations.itemsize)
            input_column = rows * 3 * activations.itemsize
            added = rows * self.out_features * 2 * activations.itemsize
            amounts[Cause.OUTLIERS] = outlier_columns * (weight_column + input_column) + added
        return amounts

    def conversion_flops(self, rows: Count, outlier_columns: float) -> dict[Cause, Count]:
        """Return the FLOPs of LLM.int8()'s 16-bit matmul of outlier columns; its int8 matmul has zeros there."""
        if self.format != "int8" or not outlier_columns:
            return {}
        return {Cause.OUTLIERS: 2 * rows * outlier_columns * self.out_features}
