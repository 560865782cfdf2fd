"""`python -m tests.simulated` prints the truth next to the profiler's figures, as one JSON document."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from .__main__ import main


@pytest.mark.slow
def test_the_command_prints_truth_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--layers 4 --bandwidth 1.3e12 --flops float16=1.1e14 --launch 7e-6 --prompt-lens 128,512 --batch-sizes 1,8"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "measured"))
    monkeypatch.setattr("sys.argv", ["tests.simulated", *asked.split()])
    main()
    found = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "measured").exists(), "simulated roofs are not stored with measured ones"
    assert found["truth"]["memory_bytes_per_s"] == 1.3e12
    assert found["recovered"] == pytest.approx(found["truth"], rel=0.05)
    cells = {(cell["phase"], cell["batch_size"], cell["prompt_len"]): cell for cell in found["cells"]}
    assert set(cells) == set(itertools.product(("prefill", "decode"), (1, 8), (128, 512)))
    for cell in cells.values():
        said, truth = cell["said"], cell["truth"]
        assert {*said} == {*truth, "confidence", "unexplained_s"}
        for name in ("latency_s", "device_s", "exposed_dispatch_s"):
            assert abs(said[name] - truth[name]) < 0.05 * truth["latency_s"], cell
        assert abs(said["unexplained_s"]) < 0.05 * truth["latency_s"], cell
