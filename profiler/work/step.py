"""The values of counting: the shape of a step, how it is executed, and the work that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from profiler.grid import CellKey
from profiler.work.causes import Cause

# Whole numbers stay exact in int64; only expectations (mixture-of-experts) are floats.
Count = int | float | NDArray[Any]


@dataclass(frozen=True)
class Step:
    """One forward pass over `batch` sequences: `query` new tokens each, after `context` cached ones.

    Each is a whole number or an int64 array; arrays broadcast, so that a grid is counted in one go.
    A prefill has context 0; a decode step has query 1.
    """

    batch: Count
    query: Count
    context: Count

    def __post_init__(self) -> None:
        for name in ("batch", "query", "context"):
            value = np.asarray(getattr(self, name))
            least = 0 if name == "context" else 1
            if value.size and (value < least).any():
                raise ValueError(f"a step's {name} must be {least} or more, not {value.min()}")

    @classmethod
    def of(cls, key: CellKey) -> Step:
        """The step that a cell's figure describes."""
        return cls(key.cell.batch_size, key.query_tokens, key.context_len)

    @property
    def tokens(self) -> Count:
        """Tokens processed in this step."""
        return self.batch * self.query


UNFUSED_KERNEL = "math"
Heads = Literal["grouped", "packed", "repeated"]
"""How transformers hands grouped heads to the kernel of `sdpa`: K and V as they are cached (`grouped`), so with the
queries of a group as rows of one head (`packed`), or with K and V written out once a query head (`repeated`)."""
Attention = Literal["sdpa", "eager", "flash_attention_2", "flex_attention"]


@dataclass(frozen=True)
class ExecutionPath:
    """How the library executes a step; what differs from the algorithm's minimum is avoidable work."""

    attention: Attention = "sdpa"
    kernel: str = "fused"
    """What `sdpa` calls when no mask is passed; `math` writes its scores out, others skip what causality hides."""
    masked_kernel: str = "fused"
    """What it calls when a mask is passed; nothing is skipped then."""
    heads: Mapping[int, Heads] = field(default_factory=dict)
    """By the width of a grouped head, how `sdpa` is handed it when no mask is passed; `grouped` where nobody asked."""
    masked_heads: Mapping[int, Heads] = field(default_factory=dict)
    """The same when a mask is passed; where nobody asked, `packed` for one query and `repeated` for several."""
    masks: bool = False
    """True when a mask is handed over whatever the shape is: that of a padded batch."""
    cache: Literal["dynamic", "static", "paged"] = "dynamic"
    static_cache_len: int = 0
    """Slots of a static cache: its attention reads all of them, filled or not."""
    all_logits: bool = False
    """True when the LM head runs on every position, though only the last one is asked for."""
    upcasts_logits: bool = False
    """True when the last logits are copied to float32 before a token is drawn, as transformers' `generate` does."""
    outlier_columns: Mapping[str, float] = field(default_factory=dict)
    """Columns that LLM.int8() multiplies in 16 bits beside its int8 product, by operator; they depend on the data."""

    @property
    def fused(self) -> bool:
        """Whether attention without a mask keeps its scores on chip."""
        return self.attention != "eager" and self.kernel != UNFUSED_KERNEL

    @property
    def fused_masked(self) -> bool:
        """Whether attention with a mask keeps its scores on chip."""
        return self.attention != "eager" and self.masked_kernel != UNFUSED_KERNEL


@dataclass(frozen=True)
class Work:
    """What a step must do. FLOPs count a multiply-add as 2; bytes are as stored.

    Model work is the algorithm's minimum. `avoidable_*` is what the execution path does beyond it, by cause.
    Vector FLOPs (softmax, norms, rotary, activations, residuals) are a class of their own and stay out of MFU.
    """

    model_flops: Count = 0
    vector_flops: Count = 0
    weight_bytes: Count = 0
    kv_read_bytes: Count = 0
    kv_write_bytes: Count = 0
    embedding_bytes: Count = 0
    logits_bytes: Count = 0
    activation_bytes: Count = 0
    """Operands and intermediates written and read between kernels; an upper bound, since caches may keep them."""
    link_bytes: Count = 0
    """Messages that ranks exchange: S of nccl-tests, the whole result of each collective; no bytes of memory."""
    avoidable_flops: Mapping[Cause, Count] = field(default_factory=dict)
    avoidable_bytes: Mapping[Cause, Count] = field(default_factory=dict)

    @property
    def model_bytes(self) -> Count:
        """Used weights once + live KV read once + new KV written once + embedding rows + logits."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.embedding_bytes + self.logits_bytes

    @property
    def executed_flops(self) -> Count:
        return self.model_flops + sum(self.avoidable_flops.values())

    @property
    def executed_bytes(self) -> Count:
        """Bytes that this path moves when no intermediate stays in a cache."""
        return self.model_bytes + self.activation_bytes + sum(self.avoidable_bytes.values())

    @property
    def intensity(self) -> Any:
        """Model FLOPs per model byte, the x of the roofline."""
        return np.asarray(self.model_flops) / np.asarray(self.model_bytes)

    def __add__(self, other: Work) -> Work:
        mine, theirs = vars(self), vars(other)
        summed: dict[str, Any] = {name: mine[name] + theirs[name] for name in _AMOUNTS}
        return Work(**summed | {name: _add_maps(mine[name], theirs[name]) for name in _BY_CAUSE})

    def __mul__(self, times: Count) -> Work:
        """This work `times` over."""
        mine = vars(self)
        scaled: dict[str, Any] = {name: mine[name] * times for name in _AMOUNTS}
        causes = {name: {cause: part * times for cause, part in mine[name].items()} for name in _BY_CAUSE}
        return Work(**scaled | causes)


_BY_CAUSE = ("avoidable_flops", "avoidable_bytes")
_AMOUNTS = tuple(item.name for item in fields(Work) if item.name not in _BY_CAUSE)


def _add_maps(left: Mapping[Cause, Count], right: Mapping[Cause, Count]) -> dict[Cause, Count]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}
