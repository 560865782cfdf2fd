"""tests/hostile/README.md explains every finding of ruff's security rules (flake8-bandit) in the package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
# | `profiler/report/svg.py` | S704 | 1 | why |
_EXPLAINED = re.compile(r"^\| `(profiler/[^`]+)` \| (S\d+) \| (\d+) \| \S.*\|$", re.MULTILINE)


def test_every_finding_is_explained() -> None:
    options = ["check", "--select", "S", "--ignore", "S101", "--output-format", "json", "profiler"]
    command = [sys.executable, "-m", "ruff", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    findings = Counter(
        (Path(item["filename"]).relative_to(ROOT).as_posix(), item["code"]) for item in json.loads(done.stdout)
    )
    page = (ROOT / "tests/hostile/README.md").read_text()
    explained = {(name, code): int(count) for name, code, count in _EXPLAINED.findall(page)}
    assert dict(findings) == explained
