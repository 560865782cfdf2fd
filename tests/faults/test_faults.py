"""A sample of faults: every condition holds after each one. All faults: python -m tests.faults"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated.native import why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

SAMPLE, SEED = 16, 0


def test_a_sample_of_faults() -> None:
    """A separate process watches clauses from the first import on, and forks without threads."""
    command = [sys.executable, "-m", "tests.faults", "--sample", str(SAMPLE), "--seed", str(SEED)]
    asked = [*command, "--scenarios", "eager,graph,nf4"]
    root = Path(__file__).parents[2]
    done = subprocess.run(asked, cwd=root, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"{SAMPLE} faults, 0 after which something does not hold" in done.stdout
