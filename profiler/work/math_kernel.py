"""The unfused kernel behind `scaled_dot_product_attention`: what it moves, and what it holds meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_FLOAT32_BYTES = 4
_BOOL_BYTES = 1


@dataclass(frozen=True)
class MathKernel:
    """One call of `_scaled_dot_product_attention_math` (torch 2.13, aten/src/ATen/native/transformers/attention.cpp).

    Sizes are numbers of elements. It computes in float32: Q, K and V of 16 bits are copied, and so is the result. Fewer
    heads of K and V than of Q are repeated. Q and K are multiplied by the root of the scale.
    """

    itemsize: int
    """Bytes of an element of Q, K, V and the result."""
    q: Any
    k: Any
    v: Any
    repeats: Any
    """How often K and V are written out: query heads a head of K."""
    outputs: Any
    scores: Any
    mask: Any
    """Scores of one head, which share a mask."""
    masked: Any
    """Whether a mask, or the causal one that it makes itself, is added to the scores."""

    @property
    def repeated_bytes(self) -> Any:
        """Traffic of K and V once a query head: written, and read."""
        return np.where(self.repeats > 1, 2 * _FLOAT32_BYTES * self.repeats * (self.k + self.v), 0)

    @property
    def traffic_bytes(self) -> Any:
        """Traffic beside that, and beside reading Q, K and V and writing the result as a fused kernel does.

        A score is written by the first product, masked in place, read and written by the softmax, read for rows that
        are hidden whole (`_safe_softmax`: a byte is written and read, and the score read and written again), and read
        by the second product. Those of 16 bits are copied into these as well, a result that nobody asked for.
        """
        twice = 2 * _FLOAT32_BYTES
        a_score = 7 * _FLOAT32_BYTES + 2 * _BOOL_BYTES + np.where(self.masked, twice, 0)
        copied = twice * (self.q + self.k + self.v + self.outputs) + self.scores * (_FLOAT32_BYTES + self.itemsize)
        scaled = twice * (self.q + self.repeats * self.k)
        return scaled + self.scores * a_score + (copied if self._copies else 0)

    @property
    def scratch_bytes(self) -> Any:
        """Most bytes held at once beside Q, K, V and the result.

        Copies, repeated heads, the scaled Q and masks stay to the end. The rest is most either at the first product,
        with the scaled K and the scores, or in the softmax, with the scores, its result and a byte for each: since
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
