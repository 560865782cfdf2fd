"""The batch-doubling command, from its request to its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiler.record.run import read_run


def test_batches_are_doubled_and_slopes_stand_beside_predictions(  # type: ignore[no-untyped-def]
    roofscope, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    options = ["--prompt", "16", "--new-tokens", "8", "--budget", "2", "--quiet", "--out", str(folder)]
    found = roofscope("batch-test", str(tiny_folder), *options)
    assert found.code == 0, found.err
    assert "speaks for" in found.out
    run = read_run(folder)
    batches = sorted(set(run.cells["batch_size"]))
    assert batches == [2**power for power in range(len(batches))]
    assert len(batches) >= 4
    [series] = [s for s in run.document.scaling if s.axis == "batch" and s.fixed["phase"] == "decode"]
    for step in series.doublings:
        assert step.low <= step.slope <= step.high
        assert step.flops_slope == pytest.approx(1.0)
        assert 0 < step.bytes_slope < 1
    assert series.best in batches


@pytest.mark.slow
def test_a_filled_cache_needs_no_prefill(roofscope, tiny_folder: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    options = ["--context", "64", "--new-tokens", "8", "--budget", "1", "--quiet", "--format", "json"]
    found = roofscope("batch-test", str(tiny_folder), *options, "--out", str(tmp_path / "run"))
    assert found.code == 0, found.err
    document = json.loads(found.out)
    assert {cell["phase"] for cell in document["cells"]} == {"decode"}
    assert document["grid"]["context_lens"] == [64]


def test_a_wrong_phase_is_one_line(roofscope, tiny_folder: Path) -> None:  # type: ignore[no-untyped-def]
    found = roofscope("batch-test", str(tiny_folder), "--phase", "training")
    assert found.code == 2
    assert "use prefill or decode" in found.err
