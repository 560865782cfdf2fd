"""A weight matrix as it lies in memory, and what its format's kernels move and compute beside the product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from profiler.work.causes import Cause
from profiler.work.step import Count

if TYPE_CHECKING:
    import torch

_FLOAT32_BYTES = 4
_FLOAT16_BYTES = 2
_INT32_BYTES = 4


@dataclass(frozen=True)
class StoredWeight:
    """A weight matrix as it lies in memory."""

    format: str
    in_features: int
    out_features: int
    weight_bytes: int
    """The packed weights with their scales, absmax, zero points and code books."""
    bias_bytes: int
    compute_dtype: torch.dtype
    """The dtype that the product runs in."""
    dense_from_rows: int | None = None
    """Rows (tokens) from which the kernel first writes a dequantised copy and then multiplies; None: it never does."""
    transposed: bool = False
    """Whether it lies inputs by outputs (GPT-2's Conv1D)."""

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.weight_bytes / (self.in_features * self.out_features)

    def conversion_bytes(self, rows: Count, activations: torch.dtype, outlier_columns: float) -> dict[Cause, Count]:
        """Bytes that the kernel moves only to convert between formats, for so many rows, by cause.

        A dense copy of a 4-bit weight is written and read back (`dense_from_rows`). LLM.int8() casts its input to
        float16, quantises it, and writes its product in int32 before it is scaled; columns with outliers are taken
        out of the input and the weight (in int8, float32 and 16 bits) and their product is added to the output
        (bitsandbytes 0.50: autograd/_functions.py, `MatMul8bitLt`; backends/default/ops.py, `int8_mixed_scaled_mm`).
        """
        if self.dense_from_rows is not None:
            dense = self.in_features * self.out_features * self.compute_dtype.itemsize
            return {Cause.DEQUANTISATION: np.where(np.asarray(rows) >= self.dense_from_rows, 2 * dense, 0)}
        if self.format != "int8":
            return {}
        cast = 0 if str(activations) == "torch.float16" else activations.itemsize + 2 * _FLOAT16_BYTES
        found: dict[Cause, Count] = {
            Cause.INT8_INPUTS: rows * self.in_features * (cast + 2),
            Cause.INT32_PRODUCTS: rows * self.out_features * 2 * _INT32_BYTES,
        }
        if outlier_columns:
            weight_column = self.out_features * (2 + 1 + 2 * _FLOAT32_BYTES + 2 * activations.itemsize)
            input_column = rows * 3 * activations.itemsize
            added = rows * self.out_features * 2 * activations.itemsize
            found[Cause.OUTLIERS] = outlier_columns * (weight_column + input_column) + added
        return found

    def conversion_flops(self, rows: Count, outlier_columns: float) -> dict[Cause, Count]:
        """FLOPs of the 16-bit product of LLM.int8()'s outlier columns, which the int8 product runs as zeros too."""
        if self.format != "int8" or not outlier_columns:
            return {}
        return {Cause.OUTLIERS: 2 * rows * outlier_columns * self.out_features}
