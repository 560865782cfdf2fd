"""Datasheet peaks against arithmetic, and cards found by what their drivers call them."""

from __future__ import annotations

import pytest

from profiler.machine.datasheet import Datasheet, find, gpus

GIB = 2**30
SHEETS = {gpu.gpu: gpu for gpu in gpus()}


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.gpu)
def test_peak_is_units_times_clock(gpu: Datasheet) -> None:
    """SMs x dense FLOPs a clock x rated clock, within 2 %; a 2:4-sparse figure would be twice that."""
    dense = gpu.sm_count * gpu.fp16_flops_per_clock_per_sm * gpu.rated_clock_hz
    assert gpu.peak_fp16_flops_per_s == pytest.approx(dense, rel=0.02)
    if gpu.peak_bf16_flops_per_s:
        assert gpu.peak_bf16_flops_per_s == gpu.peak_fp16_flops_per_s
    if gpu.peak_fp8_flops_per_s:
        assert gpu.peak_fp8_flops_per_s == pytest.approx(2 * gpu.peak_fp16_flops_per_s, rel=0.02)
    if gpu.peak_tf32_flops_per_s:
        assert gpu.peak_tf32_flops_per_s == pytest.approx(gpu.peak_fp16_flops_per_s / 2, rel=0.02)


# Results a clock and SM in float32 and float64 (CUDA C++ programming guide, "Arithmetic Instructions").
CORES = {
    "6.0": (64, 32),
    "7.0": (64, 32),
    "7.5": (64, 2),
    "8.0": (64, 32),
    "8.6": (128, 2),
    "8.9": (128, 2),
    "9.0": (128, 64),
    "10.0": (128, 64),
    "12.0": (128, 2),
}


@pytest.mark.parametrize("gpu", [gpu for gpu in gpus() if gpu.compute_capability in CORES], ids=lambda gpu: gpu.gpu)
def test_peaks_of_ordinary_cores_and_int8(gpu: Datasheet) -> None:
    """A multiply-add a core and clock. From Hopper on, ordinary cores are rated up to 15 % above the matrix units."""
    fp32, fp64 = (2 * cores * gpu.sm_count * gpu.rated_clock_hz for cores in CORES[gpu.compute_capability])
    faster = 1.16 if gpu.compute_capability in ("9.0", "10.0") else 1.04
    assert 0.98 < (gpu.peak_fp32_flops_per_s or 0) / fp32 < faster
    if gpu.peak_fp64_flops_per_s:
        assert 0.98 < gpu.peak_fp64_flops_per_s / fp64 < faster
    if gpu.peak_int8_ops_per_s and gpu.compute_capability != "7.0":  # Volta has dp4a on ordinary cores alone
        consumer = gpu.gpu in ("RTX 2080 Ti", "RTX 3090", "RTX 4090", "RTX 5090")  # float32 accumulation at half rate
        assert gpu.peak_int8_ops_per_s == pytest.approx((4 if consumer else 2) * gpu.peak_fp16_flops_per_s, rel=0.03)


@pytest.mark.parametrize(
    ("gpu", "dtype", "ridge"),
    [
        ("H100 SXM", "float16", 295.3),
        ("H200 SXM", "bfloat16", 206.1),
        ("A100 80GB SXM", "bfloat16", 153.0),
        ("T4", "float16", 203.1),
    ],
)
def test_ridges(gpu: str, dtype: str, ridge: float) -> None:
    assert SHEETS[gpu].ridge_flops_per_byte(dtype) == pytest.approx(ridge, abs=0.1)


def test_known_traps() -> None:
    assert SHEETS["A10G"].peak_fp16_flops_per_s == 70e12  # not the A10's 125
    assert SHEETS["L4"].bandwidth_bytes_per_s == 300e9
    assert SHEETS["RTX 4090"].peak_bf16_flops_per_s == 165.2e12  # float32 accumulation, as torch uses
    assert SHEETS["T4"].peak_flops_per_s("bfloat16") is None
    assert max(gpu.peak_fp16_flops_per_s or 0 for gpu in gpus() if "H100" in gpu.gpu) == 989.4e12


@pytest.mark.parametrize(
    ("name", "memory_gib", "expected"),
    [
        ("NVIDIA A10G", 22.5, "A10G"),
        ("NVIDIA A10", 22.5, "A10"),
        ("NVIDIA L40S", 44.5, "L40S"),
        ("NVIDIA L40", 44.5, None),
        ("NVIDIA L4", 22.5, "L4"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100 80GB SXM"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100 40GB SXM"),
        ("NVIDIA A100 80GB PCIe", 79.2, "A100 80GB PCIe"),
        ("Tesla T4", 14.7, "T4"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100 SXM"),
        ("NVIDIA H100 PCIe", 79.1, "H100 PCIe"),
        ("NVIDIA H100 NVL", 93.1, "H100 NVL"),
        ("NVIDIA H200", 139.8, "H200 SXM"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX 4090"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.6, None),
        ("NVIDIA GeForce RTX 4090", 15.6, None),
        ("Some Other Card", 24.0, None),
    ],
)
def test_find(name: str, memory_gib: float, expected: str | None) -> None:
    found = find(name, int(memory_gib * GIB))
    assert (found.gpu if found else None) == expected
