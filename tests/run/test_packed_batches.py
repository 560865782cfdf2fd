"""A run of packed weights says at which batches they are faster than dense ones."""

from __future__ import annotations

from pathlib import Path

import pytest

import profiler
from profiler.report.changes import packed_line

pytestmark = pytest.mark.cpu


@pytest.mark.slow
def test_a_run_of_packed_weights_times_them_against_dense_ones(tiny_folder: Path, tmp_path: Path) -> None:
    run = profiler.profile(
        str(tiny_folder), prompt_lens=[8], batch_sizes=[1], new_tokens=4, quant="nf4", budget_s=40, out=tmp_path / "run"
    )
    found = run.document.packed_batches
    assert found is not None
    assert (found.format, found.dense_dtype) == ("nf4", run.model.dtype)
    assert [item.batch for item in found.times] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert all(item.packed_s > 0 and item.dense_s > 0 and len(item.ratios) == 3 for item in found.times)
    line = packed_line(run)
    assert line is not None
    assert line in " ".join((run.folder / "report.md").read_text().split())
