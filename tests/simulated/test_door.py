"""The door for doubters prints what is so beside what is said, as one JSON document."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .guard import why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

ASKED = (
    "--model mistral-7b-v0.1 --layers 2 --bandwidth 1.3e12 --flops float16=1.1e14 --launch 7e-6 --memory 24e9"
    " --engine eager --prompt-lens 128 --batch-sizes 1,8 --format json"
)


def test_the_door_for_doubters(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.simulated", *ASKED.split()]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["truth"]["memory_bytes_per_s"] == 1.3e12
    for name in ("memory_bytes_per_s", "compute_flops_per_s"):
        assert found["recovered"][name] == pytest.approx(found["truth"][name], rel=0.03)
    for name in ("launch_s", "dispatch_s"):
        assert found["recovered"][name] == pytest.approx(found["truth"][name], rel=0.05)
    assert [(cell["phase"], cell["batch_size"]) for cell in found["cells"]] == [
        ("prefill", 1),
        ("decode", 1),
        ("prefill", 8),
        ("decode", 8),
    ]
    for cell in found["cells"]:
        assert cell["said"]["latency_s"] == pytest.approx(cell["truth"]["latency_s"], rel=0.05)
