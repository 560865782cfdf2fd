"""The acceptance script: dry on a CPU in every CI, for real where there is a card (pytest -m gpu)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("acceptance.py")


def scoreboard(folder: Path, *options: str) -> dict:  # type: ignore[type-arg]
    command = [sys.executable, str(SCRIPT), "--out", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "scoreboard.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    found = scoreboard(tmp_path, "--dry-run")
    assert found["failed"] == 0
    assert found["passed"] >= 15
    names = {check["name"] for check in found["checks"] if check["passed"] is None}
    assert any("second process" in name for name in names)
    assert all(check["why"] for check in found["checks"] if check["passed"] is None)
    assert (tmp_path / "time" / "roofline.png").exists()


@pytest.mark.gpu
@pytest.mark.timing
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_this_card(tmp_path: Path) -> None:
    found = scoreboard(tmp_path)
    assert found["failed"] == 0
    assert found["seconds"] < 9 * 60
