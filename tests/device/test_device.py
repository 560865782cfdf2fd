"""The description of a device."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from machines import CPU

from profiler.device import device
from profiler.device.device import Device, describe
from profiler.run.setup import roof_dtypes

MIB = 1 << 20


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
    assert describe(CPU).last_level_cache_bytes == mib * MIB


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
    ("cpuinfo", "told"),
    [
        (X86, ("AuthenticAMD, family 25, model 17", "1", "avx2 avx512_bf16 avx512f fma")),
        (ARM, ("implementer 0x41, variant 0x1, part 0xd40", "1", "asimd bf16 i8mm sve")),
        ("", (None, None, None)),
    ],
)
def test_a_processor_is_identified_by_more_than_its_name(
    cpuinfo: str, told: tuple[str | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(device, "CPUINFO_FILE", tmp_path / "cpuinfo")
    assert device.processor() == dict(zip(("processor", "stepping", "vector_instructions"), told, strict=True))


def test_the_dtypes_of_the_roofs_need_no_further_query_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 (7.5) multiplies float16, an A100 (8.0) bfloat16.

    A driver that fails while the roofs are set up does not matter.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", Mock(side_effect=RuntimeError("CUDA unknown error")))
    request: Any = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda", 0))
    work: Any = SimpleNamespace(operators=())
    for capability, half in (("7.5", "float16"), ("8.0", "bfloat16")):
        card = Device("cuda", "a card", 1 << 30, 4 << 20, 40, capability, None)
        assert roof_dtypes(work, request, card) == sorted(["float32", half])
