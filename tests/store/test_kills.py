"""A kill at a random moment of each command that writes; `tests/benchmarks/kills.py` kills each fifty times."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).parents[1] / "benchmarks" / "kills.py"
EACH = 1
# All in one process that forks for each kill, since imports and the run that the commands read take half a minute.
COMMANDS = ("run", "batch-test", "report", "judge", "why")


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """After each kill the files can be read, and repeating the command finishes it."""
    done = subprocess.run(
        [sys.executable, str(KILLS), "--kills", str(EACH), "--commands", ",".join(COMMANDS)],
        capture_output=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True,
        check=False,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    hits = re.findall(r"^(.+): (\d+) kills \(.*\), 0 faults$", done.stdout, re.MULTILINE)
    assert sorted(hits) == sorted((name, str(EACH)) for name in COMMANDS)
