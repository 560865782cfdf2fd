"""The work of a batch of unequal prompts: what their own tokens need, and what padding adds to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from profiler.grid import CellKey
from profiler.grid.ragged import Batch
from profiler.work.causes import Cause
from profiler.work.operators import Operator
from profiler.work.step import ExecutionPath, Step, Work


def padded_work(operator: Operator, key: CellKey, batch: Batch, path: ExecutionPath) -> Work:
    """The work of an operator in a step of a batch that is padded to its longest prompt.

    Model work is that of each prompt at its own length, with the weights read once for all of them. What the padded
    shape has beyond that is avoidable: FLOPs of padded positions, and their keys and values, which every step reads.
    """
    whole = operator.work(Step.of(key), path)
    lens = np.array([request.prompt_len for request in batch], dtype=np.int64)
    beyond = key.cell.prompt_len - lens
    own = Step(1, lens, 0) if key.phase == "prefill" else Step(1, 1, key.context_len - beyond)
    useful = operator.work(own, path)
    weights = operator.work(Step(1, int(lens.sum()) if key.phase == "prefill" else len(batch), 0), path)

    def total(amount: Any) -> Any:
        return np.broadcast_to(amount, lens.shape).sum()

    flops, read, written = map(total, (useful.model_flops, useful.kv_read_bytes, useful.kv_write_bytes))
    cached = read + written
    return replace(
        whole,
        model_flops=flops,
        vector_flops=total(useful.vector_flops),
        weight_bytes=weights.weight_bytes,
        kv_read_bytes=read,
        kv_write_bytes=written,
        embedding_bytes=total(useful.embedding_bytes),
        avoidable_flops={**whole.avoidable_flops, Cause.PADDING: whole.model_flops - flops},
        avoidable_bytes={
            **whole.avoidable_bytes,
            Cause.PADDING: whole.kv_read_bytes + whole.kv_write_bytes - cached,
        },
    )
