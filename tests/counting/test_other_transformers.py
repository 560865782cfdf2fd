"""The walk also counts the attention of an older transformers, which passes other heads to the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# 5.17 has no `pack_gqa`, and its rotary angles are a matrix product. It needs an older hub library, which needs httpx.
PACKAGES = ("transformers==5.17.0", "huggingface-hub<2", "httpx", "httpcore", "h11")
TESTS = ("test_kernels.py", "test_crosscheck.py")


@pytest.mark.slow
def test_counts_of_attention_hold_in_transformers_5_17(tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), *PACKAGES]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"transformers 5.17 cannot be had from a package registry: {done.stderr.strip()[-200:]}")
    root = HERE.parents[1]
    run = partial(
        subprocess.run, capture_output=True, text=True, cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])},
    )  # fmt: skip
    version = run([sys.executable, "-c", "import transformers; print(transformers.__version__)"], check=True)
    assert version.stdout.split()[-1] == "5.17.0"
    tests = [str(HERE / name) for name in TESTS]
    done = run([sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests])
    assert done.returncode == 0, done.stdout[-3000:]
