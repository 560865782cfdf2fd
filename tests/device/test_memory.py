"""Memory of the host: freed memory returns to the system, and limits of containers are respected."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from machines import HOST

from profiler.device import memory
from profiler.device.machine import machine_for

# Blocks below malloc's threshold for separate pages (128 KiB, mallopt(3)); the last one keeps the heap from shrinking.
SCRIPT = """
from machines import HOST
import psutil
own = psutil.Process()
blocks = [bytearray(64 << 10) for _ in range(2000)]
last = blocks.pop()
blocks.clear()
before = own.memory_info().rss
HOST.release()
print(before - own.memory_info().rss)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_freed_memory_returns_to_the_system() -> None:
    """128 MB of freed blocks below one in use."""
    path = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=path)
    assert int(done.stdout) > 100e6


@pytest.mark.parametrize(("version", "own"), [(1, "4:cpu,memory:"), (2, "0::")])
@pytest.mark.parametrize("group", ["", "job"])
def test_cached_files_are_not_memory_in_use(
    version: int, own: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container of 64 MiB with 60 in use, of which 54 cache a checkpoint that was just read: 58 are available.

    A scheduler limits a job, and the process is in one of its steps, without a limit of its own.

    The files are in the kernel's format (admin-guide/cgroup-v2, cgroup-v1/memory); any real machine has more memory.
    """
    names = ("memory.max", "memory.current", "memory.stat")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    total = "total_" if version == 1 else ""
    folder = tmp_path / ("memory" if version == 1 else "") / group
    (folder / "step").mkdir(parents=True)
    (tmp_path / "own").write_text(f"3:cpuset:/\n{own}/{group}/step\n")
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "own")
    stat = f"{total}anon {5 << 20}\n{total}inactive_file {54 << 20}\n{total}active_file {1 << 20}\n"
    for name, text in zip(names, (f"{64 << 20}\n", f"{60 << 20}\n", stat), strict=True):
        (folder / name).write_text(text)
    monkeypatch.setattr(memory, "CGROUP_FOLDER", tmp_path)
    assert HOST.available_bytes() == 58 << 20
    (folder / names[2]).unlink()
    assert HOST.available_bytes() == 4 << 20


def test_a_peak_that_cannot_begin_again_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sandboxes have no clear_refs; the peak is then that of the whole process, not of a cell."""
    machine = machine_for(torch.device("cpu"))
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "none" / "clear_refs")
    machine.reset_peak()
    assert machine.peak_bytes() is None


def test_a_container_without_a_limit_has_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{1 << 50}\n")
    monkeypatch.setattr(memory, "CGROUP_FOLDER", tmp_path)
    assert HOST.available_bytes() > 1 << 26


def test_the_asynchronous_allocator_has_no_unused_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `backend:cudaMallocAsync`, torch refuses a snapshot (c10/cuda/CUDAMallocAsyncAllocator.cpp)."""

    def no_snapshot() -> None:
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync", raising=False)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", no_snapshot)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 << 30, 16 << 30))
    assert memory.available_bytes(torch.device("cuda", 0)) == 5 << 30
