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


@pytest.mark.slow
def test_a_step_on_a_static_cache_repeats_its_heads_in_transformers_5_17(older: Path) -> None:
    """TinyLlama has 4 KV heads of 64 and 32 query heads.

    Its 22 layers repeat K and V of all 544 slots per query head. They write and read 2 x 2 x 544 x 32 x 64 x 2
    bytes each.
    """
    script = """
import torch
from dataclasses import replace
from profiler.loading.source import resolve
from profiler.loading.config import load_config
from profiler.loading.meta_model import build_on_meta
from profiler.counting.attention import AttentionCore
from profiler.counting.attention_kernel import attention_path
from profiler.facts.step import Step
from profiler.counting.walk import walk

work = walk(build_on_meta(load_config(resolve("tinyllama-1.1b")), torch.float16))
cores = [operator for operator in work.operators if isinstance(operator, AttentionCore)]
path = attention_path("sdpa", cores, torch.device("cpu"), torch.float16, query=1, keys=513)
path = replace(path, cache="static", static_cache_len=544)
print(int(work.work(Step(1, 1, 512), path).avoidable_bytes["repeat_kv copies"]))
"""
    repeated_bytes = {}
    for name, folders in {"5.17": [str(older), str(HERE.parents[1])], "here": [str(HERE.parents[1])]}.items():
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        repeated_bytes[name] = int(done.stdout.split()[-1])
    assert repeated_bytes == {"5.17": 22 * 2 * 2 * 544 * 32 * 64 * 2, "here": 0}
