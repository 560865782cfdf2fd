"""Runs in fewer bits: packed weights against dense ones, and quantised caches, counted as stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import profiler
from profiler.report.changes import packed_lines

pytestmark = pytest.mark.cpu


@pytest.mark.slow
def test_a_run_of_packed_weights_times_them_against_dense_ones(profile_tiny: Callable[..., profiler.Run]) -> None:
    run = profile_tiny(quant="nf4", budget_s=40, no_levers=False)
    found = run.document.packed_batches
    assert found is not None
    assert (found.format, found.dense_dtype) == ("nf4", run.model.dtype)
    assert [item.batch for item in found.times] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert all(item.packed_s > 0 and item.dense_s > 0 and len(item.ratios) == 3 for item in found.times)
    [line] = packed_lines(run)
    assert line in " ".join((run.folder / "report.md").read_text().split())


@pytest.mark.slow
def test_a_quantised_cache_next_to_a_growing_one(profile_tiny: Callable[..., profiler.Run]) -> None:
    """Two layers with 64 cached elements per token: 1 byte each instead of 4, for 22 old tokens and a new one."""
    sizes = {"prompt_lens": [16], "context_lens": [64], "new_tokens": 12}
    run = profile_tiny(**sizes, cache="dynamic,fp8", budget_s=5)
    assert run.document.engine.names == ("eager", "fp8-cache")
    assert {(row.engine, row.status) for row in run.results if row.status != "forecast"} >= {
        ("eager", "ok"),
        ("fp8-cache", "ok"),
    }
    assert "--engine eager,fp8-cache" in run.document.command
    rows = {(row.engine, row.key.cell.prompt_len): row for row in run.results if row.phase == "decode"}
    saved_bytes = rows["eager", 16].model_bytes - rows["fp8-cache", 16].model_bytes
    assert saved_bytes == 2 * 64 * (4 - 1) * (22 + 1)
    assert rows["fp8-cache", 16].executed_bytes > rows["eager", 16].executed_bytes
    assert "quantised, converted at every step: fp8, 8 bits" in (run.folder / "report.md").read_text()
