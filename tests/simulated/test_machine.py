"""CUDA's machine on a simulated GPU: captures and their failures, ceilings, and what `roofscope doctor` says of it."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch

from profiler.device.machine import CudaMachine, machine_for
from profiler.errors import CaptureError, RequestError
from profiler.roofs.bandwidth import measure_weights
from profiler.roofs.gemm import measurable_dtypes
from profiler.roofs.measure import measure
from profiler.run.warnings import ceiling_warnings

from .truth import GIB, H100, RTX_4090
from .world import simulated

CARD = torch.device("cuda", 0)
MIB = 1 << 20
TRUE = 0.03
# As fast as a B200's memory (8 TB/s), with a host that takes 15 µs per launch: 32 MiB are read in 4 µs.
FAST = H100.but(bytes_per_s=8e12, l2_bytes_per_s=20e12, launch_s=15e-6)
NO_ROWS = "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`"
OLDEST, NEWEST = (2, 11), (2, 14)
"""torch releases: the generator, the allocator and the pool are left in capture by the one, by the other none."""


@pytest.mark.parametrize("version", [(2, 7), OLDEST, (2, 12), NEWEST])
def test_a_machine_recovers_after_a_failed_capture(version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.7.1 has `_cuda_endAllocateCurrentStreamToPool`; from 2.8 on it is `_cuda_endAllocateToPool`."""

    def waits() -> None:
        torch.empty(GIB, dtype=torch.uint8, device="cuda")
        x.sum().item()

    with simulated(H100.but(torch_version=version)), monkeypatch.context() as patch:
        if version == (2, 7):
            ended = torch._C._cuda_endAllocateToPool
            patch.setattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", ended, raising=False)
            patch.delattr(torch._C, "_cuda_endAllocateToPool")
        machine = machine_for(CARD)
        x = torch.zeros(16, device="cuda")
        before = torch.cuda.current_stream()
        with pytest.raises(RequestError, match="cannot be captured"):
            machine.capture(waits)
        gc.collect()
        assert torch.cuda.current_stream() is before
        torch.rand(4, device="cuda")
        torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < 256 * MIB
        machine.capture(lambda: x.add_(1))()


def test_cudas_own_allocator_captures_without_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `backend:cudaMallocAsync`, torch has no MemPool (c10/cuda/CUDACachingAllocator.h, `createOrIncrefPool`)."""

    def no_pool() -> None:
        raise RuntimeError("cudaMallocAsync does not yet support createOrIncrefPool.")

    with simulated(H100):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
        monkeypatch.setattr(torch.cuda, "MemPool", no_pool)
        machine, x = machine_for(CARD), torch.zeros(16, device="cuda")
        machine.capture(lambda: x.add_(1))()
        with pytest.raises(CaptureError, match="cannot be captured"):
            machine.capture(lambda: x.sum().item())
        torch.rand(4, device="cuda")
        machine.capture(lambda: x.add_(1))()


@pytest.mark.slow
def test_a_failed_capture_is_listed_and_gives_no_bandwidth() -> None:
    """The stream is long enough for any host, so its ceiling is right."""
    error = RequestError("this cannot be captured as a CUDA graph: no.")
    with simulated(FAST), mock.patch.object(CudaMachine, "capture", side_effect=error):
        machine = machine_for(CARD)
        found = measure(machine, ["bfloat16"], model_dtype="bfloat16")
        with pytest.raises(RequestError, match="its launches would be timed"):
            measure_weights([torch.empty(4096, 4096, device=CARD)], machine, 0.01)
    assert set(found.missing) == {"reads of some sizes", "launches", "gemv bfloat16"}
    assert "its launches would be timed" in found.missing["gemv bfloat16"]
    rates = found.memory_bytes_per_s, *(point.bytes_per_s for point in found.curve)
    assert rates == pytest.approx([FAST.bytes_per_s] * len(rates), rel=TRUE)


def by_tensors(left: Any, right: Any, *, scale_a: Any, real: Any = torch._scaled_mm, **named: Any) -> torch.Tensor:
    """torch 2.10 on sm_120: pytorch/pytorch#192707."""
    if scale_a.numel() > 1:
        raise RuntimeError(NO_ROWS)
    return real(left, right, scale_a=scale_a, **named)


def test_float8_has_one_scale_a_tensor_where_rows_do_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(RTX_4090):
        whole = measure(machine_for(CARD), ["float8_e4m3fn"], model_dtype="bfloat16")
        monkeypatch.setattr(torch, "_scaled_mm", by_tensors)
        found = measure(machine_for(CARD), ["float8_e4m3fn"], model_dtype="bfloat16")
    assert "scale" not in whole.compute["float8_e4m3fn"].method
    assert found.compute["float8_e4m3fn"].method == "8192x8192x8192, one scale per tensor: scales per row failed"
    assert found.compute["float8_e4m3fn"].per_s == pytest.approx(RTX_4090.flops_per_s["float8"], rel=TRUE)
    assert found.missing == {}


@pytest.mark.parametrize(
    ("matmul", "dtype", "error"),
    [
        ("_scaled_mm", "float8_e4m3fn", RuntimeError(NO_ROWS)),
        ("_int_mm", "int8", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")),
    ],
)
def test_a_dtype_that_fails_is_listed_and_the_others_are_measured(
    matmul: str, dtype: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's datasheet of the H100 SXM: 1,979 TFLOP/s in fp8 and TOP/s in int8, dense."""
    monkeypatch.setattr(torch, matmul, mock.Mock(side_effect=error))
    with simulated(H100):
        machine = machine_for(CARD)
        dtypes = measurable_dtypes(CARD)
        found = measure(machine, dtypes, model_dtype="bfloat16")
        sheet = machine.info.datasheet
    assert found.missing == {dtype: f"{type(error).__name__}: {str(error).rstrip('.')}"}
    for name in {*dtypes} - {dtype}:
        assert found.compute[name].per_s == pytest.approx(H100.flops_per_s[name.removesuffix("_e4m3fn")], rel=TRUE)
    filled = found.only(dtypes, "bfloat16", sheet)
    assert filled.compute[dtype].per_s == pytest.approx(1979e12, rel=1e-3)
    assert [name for name in dtypes if not filled.measured(name)] == [dtype]
    assert f"the datasheet's peak replaces the ceiling of {dtype}" in ceiling_warnings(filled)[0]
    assert ceiling_warnings(found.only(dtypes, "bfloat16")) == []
