"""`python -m tests.simulated` prints the truth next to the profiler's figures, as one JSON document."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from .__main__ import main
from .native import why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

ASKED = (
    "--model mistral-7b-v0.1 --layers 4 --bandwidth 1.3e12 --flops float16=1.1e14 --launch 7e-6 --memory 24e9"
    " --engine eager --prompt-lens 128,512 --batch-sizes 1,8 --format json"
)


def test_the_command_prints_truth_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "measured"))
    monkeypatch.setattr(sys, "argv", ["tests.simulated", *ASKED.split()])
    main()
    found = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "measured").exists(), "simulated roofs are not stored with measured ones"
    assert found["truth"]["memory_bytes_per_s"] == 1.3e12
    assert found["recovered"] == pytest.approx(found["truth"], rel=0.05)
    assert {(cell["phase"], cell["batch_size"], cell["prompt_len"]) for cell in found["cells"]} == set(
        itertools.product(("prefill", "decode"), (1, 8), (128, 512))
    )
    for cell in found["cells"]:
        said, truth = cell["said"], cell["truth"]
        assert {*said} == {*truth, "confidence", "unexplained_s"}
        assert said["latency_s"] == pytest.approx(truth["latency_s"], rel=0.05)
        assert abs(said["device_s"] - truth["device_s"]) < 0.05 * truth["latency_s"], cell
        assert abs(said["unexplained_s"]) < 0.05 * truth["latency_s"], cell
        assert abs(said["exposed_dispatch_s"] - truth["exposed_dispatch_s"]) < 0.05 * truth["latency_s"], cell
