"""With padding, the work of each separate prompt is model work, and the rest is avoidable."""

from __future__ import annotations

import pytest
from small_models import small_model

from profiler.counting.operators import Linear, padded_work
from profiler.counting.walk import walk
from profiler.facts.operators import Cause
from profiler.facts.step import ExecutionPath, Step, Work
from profiler.grid.cells import CellKey, Phase
from profiler.grid.ragged import Ragged, Request
from profiler.grid.ranges import make_grid

LENS = (64, 128, 64, 128)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_half_as_long_is_half_of_the_work(phase: Phase) -> None:
    """Two of four prompts are half as long. Model work is that of separate prompts, executed work that of the batch."""
    model = walk(small_model("Llama", num_key_value_heads=4))
    ragged = Ragged("made", tuple(Request(length, 8) for length in LENS))
    key = CellKey(phase, make_grid(ragged, [4], 8).cells[0])
    path = ExecutionPath(masks=True)
    whole = model.work(Step.of(key), path)
    found = sum((padded_work(operator, key, ragged.requests, path) for operator in model.operators), Work())

    def step_of(length: int) -> Step:
        return Step(1, length, 0) if phase == "prefill" else Step(1, 1, key.context_len - (128 - length))

    each = [model.work(step_of(length), path) for length in LENS]
    assert found.model_flops == sum(work.model_flops for work in each)
    assert found.kv_read_bytes + found.kv_write_bytes == sum(work.kv_read_bytes + work.kv_write_bytes for work in each)
    assert found.weight_bytes == each[0].weight_bytes
    assert found.executed_flops == whole.executed_flops
    linears = [padded_work(op, key, ragged.requests, path) for op in model.of_kind(Linear) if op.rows == "tokens"]
    share = sum(w.avoidable_flops[Cause.PADDING] for w in linears) / sum(w.executed_flops for w in linears)
    # A linear sees every position of a prompt, and a quarter is padding. A step sees one token of each prompt.
    assert share == (0.25 if phase == "prefill" else 0)
    if phase == "decode":
        # A row has 128 + 4 cached positions, and 64 are padding in two of four rows: keys and values of 2 layers.
        assert found.avoidable_bytes[Cause.PADDING] == 2 * 64 * 2 * 64 * 2 * 4
