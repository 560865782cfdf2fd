"""The device: its description, its memory, its graphs, and the names of cache arguments in transformers."""

import os
import platform
import warnings
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch
from machines import CPU, HOST
from small_models import small_model

from profiler.device import clock, device, memory
from profiler.device.device import describe
from profiler.device.machine import machine_for
from profiler.engines.transformers import EagerEngine


@pytest.mark.parametrize(("cores", "mib"), [(set(range(16)), 64), ({8, 9}, 32)], ids=["all", "one die"])
def test_caches_of_the_cores_of_a_process_add_up(
    cores: set[int], mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ryzen 9 7950X: two dies of eight cores with 32 MiB of L3 each (AMD's product page: 64 MB)."""
    levels = [(range(core, core + 1), 2, "1024K") for core in range(16)]
    for sharing, index, size in (*levels, (range(8), 3, "32768K"), (range(8, 16), 3, "32768K")):
        for core in sharing:
            cache = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
            cache.mkdir(parents=True)
            (cache / "size").write_text(f"{size}\n")
            (cache / "shared_cpu_list").write_text(f"{sharing[0]}-{sharing[-1]}\n")
    monkeypatch.setattr(device, "CPUS_FOLDER", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: cores, raising=False)
    assert describe(CPU).last_level_cache_bytes == mib << 20


X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fpu sse2 avx2 fma avx512f avx512_bf16

processor\t: 1
cpu family\t: 26
"""
ARM = """processor\t: 0
Features\t: fp asimd sve i8mm bf16
CPU implementer\t: 0x41
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1
"""


@pytest.mark.parametrize(
    ("cpuinfo", "known"),
    [
        (X86, ("AuthenticAMD, family 25, model 17", "1", "avx2 avx512_bf16 avx512f fma")),
        (ARM, ("implementer 0x41, variant 0x1, part 0xd40", "1", "asimd bf16 i8mm sve")),
        ("", (None, None, None)),
    ],
)
def test_a_processor_is_identified_by_more_than_its_name(
    cpuinfo: str, known: tuple[str | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(device, "CPUINFO_FILE", tmp_path / "cpuinfo")
    assert device.processor() == dict(zip(("processor", "stepping", "vector_instructions"), known, strict=True))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_freed_memory_returns_to_the_system() -> None:
    """118 MB of freed blocks, each between others in use, below malloc's threshold for separate pages (mallopt(3))."""
    blocks = [bytearray(64 << 10) for _ in range(2000)]
    blocks = blocks[::10]
    before = psutil.Process().memory_info().rss
    HOST.release()
    assert before - psutil.Process().memory_info().rss > 100e6


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


@pytest.mark.parametrize(("wall_s", "core_s"), [(5.0, 2.0), (2.0, 2.25)], ids=["others had the core", "a coarse tick"])
def test_own_time_is_that_on_a_core_and_no_longer_than_the_clocks(
    wall_s: float, core_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "now_s", Mock(side_effect=[10.0, 10.0 + wall_s]))
    monkeypatch.setattr(clock, "thread_time", Mock(side_effect=[1.0, 1.0 + core_s]))
    assert clock.core_timer()() == 2.0


def test_a_step_uses_no_deprecated_name() -> None:
    engine = EagerEngine(small_model("Llama"), HOST)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.decode(engine.prefill(torch.zeros(1, 4, dtype=torch.long), 8))


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("4", True), ("0.8", True), ("true", True), ("avx2", True), (":4096:8", True), ("AVX512_CORE_AMX_FP16", True),
        ("backend:cudaMallocAsync", True), ("expandable_segments:True,garbage_collection_threshold:0.8", True),
        ("", False), ("/home/me", False), ("~/x", False), ("C:\\x", False), ("10.0.0.1", False), ("1 2", False),
        ("me@host", False), ("GPU-8f3b", False), ("$(id)", False), ("1\n", False), ("AKIAIOSFODNN7EXAMPLE", False),
        ("hf_abcdefghijklmnopqrstuvwxyz", False), ("granularity=fine", False), ("1," * 40 + "1", False),
    ],
)  # fmt: skip
def test_settings_of_the_environment_are_short_words_and_numbers(
    value: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are those of torch's, cuBLAS's and oneDNN's documentation, and AWS's example of a key."""
    for name in device.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = {"PYTORCH_ALLOC_CONF": value} if kept else {}
    assert device.environment() == found
    assert {name: each for name, each in device.software().items() if name.isupper()} == found


@pytest.mark.parametrize(("mib", "counted_mib"), [(9.5, 9.5), (11, 12), (12, 12), (12.75, 12.75), (23.6, 24)])
def test_a_large_tensor_counts_with_the_rest_of_its_segment(mib: float, counted_mib: float) -> None:
    """c10/cuda/CUDACachingAllocator.cpp: multiples of 2 MiB from 10 MiB on, of which more than 1 MiB is split off."""
    assert memory.block_bytes(int(mib * (1 << 20))) == int(counted_mib * (1 << 20))
