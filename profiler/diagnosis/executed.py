"""What an engine executes of a step on a card: the one account of it that forecasts and prices rest on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler.diagnosis.columns import Array, Demanded
from profiler.machine.published import EngineKind
from profiler.work.causes import OF_CONTEXT


@dataclass(frozen=True)
class WorkAt:
    """The work of many steps, as arrays of one length."""

    flops: Array
    weight_bytes: Array
    kv_bytes: Array
    """Of the cache: read, written, and what plain transformers move of it besides."""

    def at(self, chosen: Array) -> WorkAt:
        """Those that `chosen` picks."""
        return WorkAt(self.flops[chosen], self.weight_bytes[chosen], self.kv_bytes[chosen])


def executed(needed: Demanded, engine: EngineKind) -> WorkAt:
    """The algorithm's work; of plain transformers (`eager`) also what their cache and attention add with the context:
    copies, a latent expanded again, heads and scores written out.

    What else they do beyond the algorithm (operands between kernels, dequantising) is in what they attain.
    """
    zeros = np.zeros(len(needed.steps))
    causes = OF_CONTEXT if engine == "eager" else frozenset()
    flops, weight_bytes, kv_bytes = zeros.copy(), zeros.copy(), zeros.copy()
    for column in needed.columns:
        flops += column.flops + sum((column.avoidable_flops.get(cause, 0.0) for cause in causes), zeros)
        weight_bytes += column.weight_bytes
        kv_bytes += column.kv_bytes + sum((column.avoidable_bytes.get(cause, 0.0) for cause in causes), zeros)
    return WorkAt(flops, weight_bytes, kv_bytes)
