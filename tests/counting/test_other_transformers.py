"""The walk also counts the attention of an older transformers, which passes other heads to the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# 5.17 has no `pack_gqa`, and its rotary angles are a matrix product. It needs an older hub library, which needs httpx.
PACKAGES = ("transformers==5.17.0", "huggingface-hub<2", "httpx", "httpcore", "h11")
TESTS = ("test_kernels.py", "test_crosscheck.py")


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with transformers 5.17, for the start of the path."""
    folder = tmp_path_factory.mktemp("transformers-5.17")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"transformers 5.17 cannot be had from a package registry: {done.stderr.strip()[-200:]}")
    return folder


@pytest.mark.slow
def test_counts_of_attention_hold_in_transformers_5_17(older: Path) -> None:
    root = HERE.parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(older), str(root)])}
    version = subprocess.run(
        [sys.executable, "-c", "import transformers; print(transformers.__version__)"],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    assert version.stdout.split()[-1] == "5.17.0"
    tests = [str(HERE / name) for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests],
        capture_output=True, text=True, env=environment, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
