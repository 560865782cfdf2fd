"""The work of one operator, and the causes of redundant work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Amount = int | float
"""FLOPs or bytes; whole numbers stay whole."""

NO_AMOUNTS: Mapping[Cause, Amount] = {}
"""The redundant work of most operators; one shared object, since a large run has hundreds of thousands."""

_TILE = 128
_ROW_BITS = 128


@dataclass(frozen=True)
class GemmShape:
    """A matmul [m, k] x [k, n] that runs `count` times per step."""

    m: int
    n: int
    k: int
    dtype: str
    count: int

    def __str__(self) -> str:
        """As operators.csv has it: `32*16x4096x1024` is 32 matmuls with m = 16, n = 4096 and k = 1024."""
        return f"{self.count}*{self.m}x{self.n}x{self.k}"

    @classmethod
    def parse(cls, text: str, dtype: str) -> GemmShape:
        """Return the shape of such a text. Raises ValueError for another text."""
        count, shape = text.split("*")
        m, n, k = map(int, shape.split("x"))
        if min(m, n, k, int(count)) < 1:
            raise ValueError(f"{text!r} is no matmul")
        return cls(m, n, k, dtype, int(count))

    @property
    def tiles_used(self) -> float:
        """The used share of the tiles of 128 x 128 that cover the result.

        NVIDIA, Matrix Multiplication Background User's Guide, "Tile Quantization". Kernels also have smaller tiles.
        """
        rows, columns = (_TILE * -(-size // _TILE) for size in (self.m, self.n))
        return self.m * self.n / (rows * columns)

    @property
    def aligned(self) -> bool:
        """Whether n and k are multiples of 16 bytes, 8 elements of 16 bits, as matrix units need them (same guide)."""
        bits = int((re.findall(r"\d+", self.dtype) or [8])[0])
        return all(size * bits % _ROW_BITS == 0 for size in (self.n, self.k))


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """The work of one operator of a step, summed over its `count` equal instances."""

    operator: str
    group: str
    count: int
    dtype: str
    """The dtype of its arithmetic, which selects its compute ceiling."""
    flops: Amount
    """Model FLOPs: the minimum of the algorithm."""
    weight_bytes: Amount
    """Weights as stored, embedding rows and logits."""
    kv_bytes: Amount
    """Cache read and written."""
    activation_bytes: Amount
    """Operands and intermediates written and read between kernels; an upper bound."""
    redundant_flops: Mapping[Cause, Amount] = field(default_factory=dict)
    redundant_bytes: Mapping[Cause, Amount] = field(default_factory=dict)
    bus_bytes: Amount = 0
    """For a collective: the bytes that cross each rank's link, message x the factor of nccl-tests."""
    gemms: str = ""
    """Its matmuls with weights, each as `GemmShape` writes it; empty for others, and in older runs."""

    @property
    def model_bytes(self) -> Amount:
        """Bytes of weights and cache: the minimum of the algorithm."""
        return self.weight_bytes + self.kv_bytes

    @property
    def executed_flops(self) -> Amount:
        return self.flops + sum(self.redundant_flops.values())

    @property
    def executed_bytes(self) -> Amount:
        """Bytes that the library moves if no intermediate stays in a cache."""
        return self.model_bytes + self.activation_bytes + sum(self.redundant_bytes.values())


COLLECTIVE = "collective"
"""The group of operators that exchange results between ranks."""

REST = "all other kernels"
"""The name among the replayed operators for all small kernels between them."""


class Cause(StrEnum):
    """Causes of redundant work, by the names that counts, reports and changes use."""

    MASKED_SCORES = "masked scores"
    CACHE_COPIES = "cache copies"
    ROLLED_WINDOWS = "rolled windows"
    """A full window is copied at every step, in a dynamic cache and in a static one."""
    CACHE_CONVERSION = "cache conversion"
    """A quantised cache is converted to the model's dtype in every step."""
    CONVERTED_READS = "converted cache read"
    """The attention kernel reads the converted cache, which is wider than the stored one."""
    SHARED_READS = "shared prefix read again"
    """A plain attention kernel reads the prefix that sequences share once for each of them."""
    REREAD_WEIGHTS = "weights read again"
    """A step runs a block several times, for several layers or cycles."""
    PADDING = "padding"
    """Positions that hold no token of any prompt."""
    UNFILLED_SLOTS = "unfilled cache slots"
    REPEATED_HEADS = "repeat_kv copies"
    ATTENTION_MATRIX = "attention matrix"
    LATENT_EXPANDED = "latent expanded again"
    UNASKED_LOGITS = "logits nobody asked for"
    UPCAST_LOGITS = "logits upcast to float32"
    UNCHOSEN_EXPERTS = "experts nobody chose"
    GATHERED_EXPERTS = "experts copied per token"
    """A decode step of `generate` on a GPU copies the weights of each token's experts before it multiplies them."""
    UNCHOSEN_KEYS = "keys that no indexer chose"
    OPERANDS = "operands"
    """Operands and intermediates written and read between kernels."""
    PAGE_FAULTS = "page faults"
    """Counted in pages, not in bytes."""
    DEQUANTISATION = "dequantisation round trip"
    INT8_INPUTS = "int8 inputs"
    INT32_RESULTS = "int32 results"
    OUTLIERS = "int8 outlier columns"


OF_CONTEXT = frozenset(
    {
        Cause.MASKED_SCORES, Cause.CACHE_COPIES, Cause.ROLLED_WINDOWS, Cause.UNFILLED_SLOTS, Cause.REPEATED_HEADS,
        Cause.ATTENTION_MATRIX, Cause.LATENT_EXPANDED, Cause.CACHE_CONVERSION, Cause.CONVERTED_READS,
        Cause.UNCHOSEN_KEYS,
    }
)  # fmt: skip
"""Causes whose work grows with the cache; rates attained at short contexts do not apply to it."""
COPIES = frozenset({Cause.CACHE_COPIES, Cause.ROLLED_WINDOWS})
"""Causes whose tokens are read and written once more."""
OUTSIDE = COPIES | {Cause.CACHE_CONVERSION, Cause.LATENT_EXPANDED, Cause.UPCAST_LOGITS, Cause.GATHERED_EXPERTS}
"""Causes of traffic before or after an operator's call, which a replay of the call does not include."""
