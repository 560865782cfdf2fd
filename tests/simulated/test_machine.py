"""CUDA's machine on a simulated GPU: captures and their failures, ceilings, and what `roofscope doctor` says of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from profiler.checks.doctor import examine
from profiler.device.machine import CudaMachine, machine_for
from profiler.errors import CaptureError, RequestError, RunError
from profiler.facts.ceilings import DATASHEET
from profiler.forecast.command import run_facts
from profiler.report.write import markdown_report
from profiler.roofs.bandwidth import measure_weights
from profiler.roofs.gemm import measurable_dtypes
from profiler.roofs.measure import measure
from profiler.run.warnings import ceiling_warnings
from profiler.store.folder import Run

from .card import Card
from .scenario import Scenario, said
from .truth import GIB, H100, RTX_4090, T4, Truth
from .world import simulated, standing_in

CARD = torch.device("cuda", 0)
MIB = 1 << 20
TRUE = 0.03
# As fast as a B200's memory (8 TB/s), with a host that takes 15 µs per launch: 32 MiB are read in 4 µs.
FAST = H100.but(bytes_per_s=8e12, l2_bytes_per_s=20e12, launch_s=15e-6)
NO_ROWS = "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`"
POISONED = "Offset increment outside graph capture encountered unexpectedly."
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
    ("product", "dtype", "error"),
    [
        ("_scaled_mm", "float8_e4m3fn", RuntimeError(NO_ROWS)),
        ("_int_mm", "int8", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")),
    ],
)
def test_a_dtype_that_fails_is_listed_and_the_others_are_measured(
    product: str, dtype: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's datasheet of the H100 SXM: 1,979 TFLOP/s in fp8 and TOP/s in int8, dense."""
    monkeypatch.setattr(torch, product, mock.Mock(side_effect=error))
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


def run_without_ceilings(truth: Truth, folder: Path) -> Run:
    """Return a run on a card without random numbers, as after a failed capture with torch 2.7 to 2.11.

    No ceiling is measured, and no operator is replayed.
    """

    def poisoned(real: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*size: Any, **named: Any) -> Any:
            if torch.device(named.get("device") or "cpu").type == "cuda":
                raise RuntimeError(POISONED)
            return real(*size, **named)

        return draw

    scenario = Scenario("mistral-7b-v0.3", 1, engine="eager,graph", prompt_lens=[128], batch_sizes=[1])
    with mock.patch("torch.rand", poisoned(torch.rand)), mock.patch("torch.randn", poisoned(torch.randn)):
        run, _ = said(scenario, [truth], folder, budget=2)
    return run


@pytest.mark.slow
def test_without_any_ceiling_cells_have_times_and_counts_and_no_regime(tmp_path: Path) -> None:
    run = run_without_ceilings(H100.but(name="NVIDIA Unknown"), tmp_path)
    assert len(run.measured) == 4
    assert {(row.status, row.regime, row.confidence) for row in run.measured} == {("ok", None, None)}
    assert all(row.latency_s > 0 and row.flops_per_s > 0 and row.model_bytes > 0 for row in run.measured)
    assert run.document.ceilings.memory_bytes_per_s is None
    assert any("there is no ceiling of memory: cells have times and counts" in line for line in run.document.warnings)
    ceilings = [part for part in run.document.missing if part.effect == "this ceiling is missing"]
    assert len(ceilings) == 7
    assert all(POISONED.rstrip(".") in part.why for part in ceilings)
    [saved] = [item for item in run.document.engine.differences if item.phase == "decode"]
    assert saved.saves_s > 0, "the savings of an engine are known without a ceiling"
    with pytest.raises(RunError, match="no ceiling of memory"):
        run_facts(run.folder)


@pytest.mark.slow
def test_a_datasheet_replaces_ceilings_and_is_marked(tmp_path: Path) -> None:
    """NVIDIA's datasheet of the H100 SXM: 3.35 TB/s, and 989 TFLOP/s in 16 bits, dense."""
    run = run_without_ceilings(H100, tmp_path)
    assert run.document.ceilings.memory_bytes_per_s == pytest.approx(3.35e12)
    matmuls = run.document.ceilings.compute["float16"]
    assert (matmuls.method, matmuls.measured, matmuls.clock_hz) == (DATASHEET, False, None)
    assert matmuls.per_s == pytest.approx(989e12, rel=1e-3)
    assert {row.confidence for row in run.measured} <= {"medium", "low"}, (
        "an unmeasured ceiling gives no high confidence"
    )
    assert any("the datasheet's peak replaces the ceiling of read" in line for line in run.document.warnings)
    assert "3.35 TB/s and 989 TFLOP/s, not all measured here" in markdown_report(run)


@pytest.mark.slow
def test_a_t4() -> None:
    """One sequence of a 7B model fits in 16 bits: weights of 14.5 GB and 0.3 GB more, in 15.5 GB of room."""
    with simulated(T4, T4):
        found = examine()
    says = {item.name: item.says for item in found.findings}
    assert says["driver"] == "NVIDIA 580.00, supports CUDA up to 13.0"
    assert "Tesla T4, 40 SMs, compute capability 7.5, one of 2" in says["device"]
    assert "datasheet T4: 320 GB/s, 65.0 TFLOP/s in float16, no bfloat16 units" in says["device"]
    works = {item.name for item in found.findings if item.works}
    assert works >= {"torch", "device", "memory", "NVML", "bitsandbytes", "graphs", "fits"}
    fits = {(fit.model, fit.precision): fit.fits for fit in found.fits}
    assert {precision for _, precision in fits} == {"float16", "int8", "nf4"}
    assert fits["mistral-7b-v0.1", "float16"], "one sequence fits; the first command has eight, which fit in nf4"
    assert not fits["llama-3.1-8b", "float16"], "16.1 GB"
    assert fits["llama-2-7b", "float16"], "13.5 GB of about 14"
    assert not fits["mixtral-8x7b", "nf4"]
    assert found.first == "roofscope run mistral-7b-v0.1 --quant nf4 --prompt-lens 512 --batch-sizes 1,8"


@pytest.mark.slow
def test_a_card_on_which_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each problem is one line: no kernels for an old card, another process with its memory, no NVML."""
    error = torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device")
    monkeypatch.setattr("profiler.loading.source.preset_names", lambda: ("gpt2",))
    dead = mock.patch.object(Card, "launch", side_effect=error)
    with simulated(T4.but(taken_bytes=12 << 30)), standing_in("pynvml", None), dead:
        seen = examine()
    found = {item.name: item for item in seen.findings}
    assert seen.first == "fix device, then run `roofscope doctor` again"
    assert [found[name].works for name in ("device", "memory", "NVML", "bitsandbytes", "compile", "graphs")] == [
        False
    ] * 6
    assert "no kernel image" in found["device"].says
    assert "other processes hold 80 %" in found["memory"].says
    assert "pip install 'nvidia-ml-py>=12.535'" in found["NVML"].says
    assert found["graphs"].says.endswith("no --engine graph")
