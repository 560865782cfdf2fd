"""What a library's path does beyond the algorithm's minimum, cause by cause."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why work is avoidable: the names under which it is counted, shown, and looked up by levers."""

    MASKED_SCORES = "masked scores"
    CACHE_COPIES = "cache copies"
    PADDING = "padding"
    """Positions that hold no token of any prompt."""
    UNFILLED_SLOTS = "unfilled cache slots"
    REPEATED_HEADS = "repeat_kv copies"
    ATTENTION_MATRIX = "attention matrix"
    LATENT_EXPANDED = "latent expanded again"
    UNASKED_LOGITS = "logits nobody asked for"
    UPCAST_LOGITS = "logits upcast to float32"
    UNCHOSEN_EXPERTS = "experts nobody chose"
    OPERANDS = "operands"
    """Operands and intermediates that are written and read between kernels."""
    PAGE_FAULTS = "page faults"
    """Counted in pages, not in bytes."""
    DEQUANTISATION = "dequantisation round trip"
    INT8_INPUTS = "int8 inputs"
    INT32_PRODUCTS = "int32 products"
    OUTLIERS = "int8 outlier columns"


OF_CONTEXT = frozenset(
    {
        Cause.MASKED_SCORES, Cause.CACHE_COPIES, Cause.UNFILLED_SLOTS, Cause.REPEATED_HEADS, Cause.ATTENTION_MATRIX,
        Cause.LATENT_EXPANDED,
    }
)  # fmt: skip
"""Work that grows with the cache: what steps at short contexts attain tells nothing of it."""
OUTSIDE = frozenset({Cause.CACHE_COPIES, Cause.LATENT_EXPANDED, Cause.UPCAST_LOGITS})
"""Traffic before or behind an operator's own call, which running the call alone does not include."""
