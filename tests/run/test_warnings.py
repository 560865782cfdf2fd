"""Warnings about other processes on the machine, and about a GPU that is slower than it should be."""

from __future__ import annotations

from pathlib import Path

import pytest
from machines import Others

from profiler.data.datasheets import gpus
from profiler.device.device import Device
from profiler.facts.roofs import Ceilings, Roof
from profiler.judge.warnings import health_warnings
from profiler.run.warnings import busy_words, device_warnings

SHEETS = {gpu.gpu: gpu for gpu in gpus()}


def card(name: str) -> Device:
    sheet = SHEETS[name]
    return Device("cuda", name, sheet.memory_bytes, sheet.l2_bytes, sheet.sm_count, sheet.compute_capability, sheet)


def reaching(dtype: str, flops_per_s: float, copy_bytes_per_s: float) -> Ceilings:
    return Ceilings(
        compute={dtype: Roof(flops_per_s, flops_per_s, flops_per_s, 1, "a product")},
        memory={"copy": Roof(copy_bytes_per_s, copy_bytes_per_s, copy_bytes_per_s, 1, "a copy")},
        stream_bytes=1 << 30,
        beyond_cache=True,
    )


@pytest.mark.parametrize(
    ("threads", "busy", "cores", "warned"),
    [
        (2, 0.1, 2, False), (2, 1.0, 2, True), (1, 0.9, 2, False), (1, 1.9, 2, True), (16, 3.0, 16, True),
        (None, 14.0, 16, False), (None, 15.9, 16, True),
    ],
)  # fmt: skip
def test_others_are_told_of_where_they_take_cores_that_are_needed(
    threads: int | None, busy: float, cores: int, warned: bool
) -> None:
    """A GPU needs one core of its host."""
    info = Device("cpu", "a CPU", 1 << 30, 1 << 20, threads, None, None) if threads else card("T4")
    found = busy_words(info.host_threads, Others(busy, cores))
    assert bool(found) == warned
    if warned:
        assert f"other processes keep {busy:.1f} of {cores} cores busy" in found[0]


def test_memory_may_spill_under_wsl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel of WSL 2 names itself in /proc/version."""
    kernel = tmp_path / "version"
    kernel.write_text("Linux version 5.15.153.1-microsoft-standard-WSL2 (root@941d701f84f1) (gcc 11.2.0)\n")
    monkeypatch.setattr("profiler.device.device.KERNEL_FILE", kernel)
    [warning] = device_warnings(card("T4"))
    assert "may spill to system memory" in warning
    assert "'Prefer No Sysmem Fallback'" in warning
    assert device_warnings(Device("cpu", "a CPU", 1 << 30, 1 << 20, 1, None, None)) == []
    kernel.write_text("Linux version 6.8.0-45-generic (buildd@lcy02-amd64-115)\n")
    assert device_warnings(card("T4")) == []


@pytest.mark.parametrize(
    ("name", "dtype", "flops_per_s", "copy_bytes_per_s"),
    [
        ("H100 SXM", "bfloat16", 680e12, 3.0e12),
        ("H200 SXM", "bfloat16", 686e12, 4.3e12),
        ("L40S", "bfloat16", 170e12, 0.65e12),
        ("T4", "float16", 24e12, 239.6e9),
    ],
)
def test_a_healthy_card_is_not_warned_of_and_a_slow_one_is(
    name: str, dtype: str, flops_per_s: float, copy_bytes_per_s: float
) -> None:
    """The rates were measured on real cards of these kinds, over seconds: none is the burst of its first products."""
    info = card(name)
    assert health_warnings(info.datasheet, reaching(dtype, flops_per_s, copy_bytes_per_s)) == []
    [slow] = health_warnings(info.datasheet, reaching(dtype, 0.7 * flops_per_s, copy_bytes_per_s))
    assert f"this {name} sustains" in slow
    assert f"{dtype} products" in slow
    [slow] = health_warnings(info.datasheet, reaching(dtype, flops_per_s, 0.7 * copy_bytes_per_s))
    assert "copies" in slow
