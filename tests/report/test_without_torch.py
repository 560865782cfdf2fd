"""Reports need no torch, so they can be written on machines that measure nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import PRECISIONS, ROOT

SCRIPT = """
import sys
for name in ("torch", "transformers", "accelerate", "bitsandbytes", "pynvml"):
    sys.modules[name] = None
import importlib, pkgutil
from pathlib import Path
import profiler.report
for module in pkgutil.walk_packages(profiler.report.__path__, "profiler.report."):
    importlib.import_module(module.name)
from profiler.store.folder import read_run
from profiler.report.terminal import print_sections, screen
from profiler.run.screens import comparison_sections, doubling_sections, write_comparison
from profiler.report.write import write_reports
from profiler.report.sections import run_sections
base = Path(sys.argv[1])
runs = [read_run(base / name) for name in ("none", "nf4")]
write_reports(runs)
write_comparison(runs, base)
print_sections(run_sections(runs[0]), screen())
print_sections(doubling_sections(runs[0], "decode"), screen())
print_sections(comparison_sections(runs, [""] * len(runs)), screen())
"""


@pytest.mark.slow
@pytest.mark.ci
def test_everything_renders_without_torch(tmp_path: Path) -> None:
    base = shutil.copytree(PRECISIONS, tmp_path / "both")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(base)], capture_output=True, text=True, check=False, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "Decode at batch 1 is" in done.stdout
    assert "evidence" in done.stdout  # for: on the next line where the terminal is narrow
    assert "speed-up" in done.stdout
    for folder in (base / "none", base / "nf4"):
        for name in ("report.html", "report.md", "roofline.png", "map.png", "split.png"):
            assert (folder / name).stat().st_size > 1000, name
    assert (base / "report.html").stat().st_size > 5000
