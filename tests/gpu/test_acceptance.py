"""The acceptance script: dry on a CPU in every CI, for real where there is a card (pytest -m gpu)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import acceptance
import pytest
import torch


def scoreboard(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> dict[str, Any]:
    """What the script found, run in this process: its models and libraries are loaded already."""
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--out", str(folder), *options])
    assert acceptance.main() == 0
    found: dict[str, Any] = json.loads((folder / "scoreboard.json").read_text())
    return found


@pytest.mark.slow
def test_dry_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shares = acceptance._shares
    few = ("none", "nf4", "int8wo")  # one that converts by groups, one by rows; each is tested of itself elsewhere
    monkeypatch.setattr(acceptance, "_shares", lambda bench: [pair for pair in shares(bench) if pair[0] in few])
    monkeypatch.setattr(acceptance, "PLOTS", ("roofline",))
    monkeypatch.setattr("profiler.job.selftest._BUDGET_S", 0.3)  # of each kernel, whose label is judged on cards alone
    monkeypatch.setattr("profiler.job.batch_test.MOST_SEQUENCES", 64)  # what a doubling reaches is shown, not judged
    found = scoreboard(monkeypatch, tmp_path, "--dry-run")
    assert found["failed"] == 0
    assert found["passed"] >= 12
    names = {check["name"] for check in found["checks"] if check["passed"] is None}
    assert any("second process" in name for name in names)
    assert all(check["why"] for check in found["checks"] if check["passed"] is None)
    assert (tmp_path / "time" / "roofline.png").exists()


@pytest.mark.gpu
@pytest.mark.timing
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_this_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = scoreboard(monkeypatch, tmp_path)
    assert found["failed"] == 0
    assert found["seconds"] < 9 * 60
