"""The line with the break-even batch of packed weights."""

from __future__ import annotations

from made_runs import whole_run, with_document

from profiler.facts.measurements import BatchTimes, PackedBatches
from profiler.report.changes import packed_lines

PACKED_S = {1: 1e-3, 4: 1.5e-3, 8: 3e-3, 16: 9e-3}
"""Time by batch; the dense linears take 2 ms at every batch."""


def test_it_names_both_ends_and_the_batches_between_which_they_break_even() -> None:
    times = tuple(BatchTimes(batch, packed_s, 2e-3, (packed_s / 2e-3,) * 3) for batch, packed_s in PACKED_S.items())
    packed = PackedBatches("nf4", "bitsandbytes::gemv_4bit", "bfloat16", times)
    [line] = packed_lines(with_document(whole_run(), packed_batches=packed))
    assert line == (
        "nf4 (bitsandbytes::gemv_4bit) against dense bfloat16, all packed linears of a decode step: packed weights are"
        " faster at batch 1 to 4; dense weights are faster at batch 8 to 16 (1.00 ms against 2.00 ms at batch 1 and"
        " 9.00 ms against 2.00 ms at batch 16)"
    )
