"""CUDA's machine on a simulated GPU: captures, ceilings, its power limit and counters, and what `doctor` says of it."""

import gc
from typing import Any
from unittest import mock

import pytest
import torch

from profiler.checks.doctor import examine
from profiler.device import telemetry
from profiler.device.machine import CudaMachine, machine_for
from profiler.device.telemetry import nvml_source
from profiler.effort import Effort
from profiler.errors import CaptureError, RequestError
from profiler.facts.ceilings import drift
from profiler.loading.source import presets
from profiler.roofs.bandwidth import measure_weights
from profiler.roofs.gemm import measurable_dtypes, measure_gemm
from profiler.roofs.measure import DriftProbe, measure
from profiler.roofs.sampler import clocked
from profiler.run.warnings import ceiling_warnings

from . import nvml
from .truth import CAPPED_SHARE, GIB, H100, RTX_4090, T4, capped
from .world import simulated

CARD = torch.device("cuda", 0)
MIB = 1 << 20
TRUE = 0.03
# As fast as a B200's memory (8 TB/s), with a host that takes 15 µs per launch: 32 MiB are read in 4 µs.
FAST = H100.but(bytes_per_s=8e12, l2_bytes_per_s=20e12, launch_s=15e-6)
NO_ROWS = "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`"


@pytest.mark.parametrize("version", [(2, 7), (2, 11), (2, 12), (2, 14)])
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
    assert f"the datasheet's peak replaces the ceiling of {dtype}" in next(ceiling_warnings(filled))
    assert not list(ceiling_warnings(found.only(dtypes, "bfloat16")))


@pytest.mark.slow
def test_doctor_examines_a_t4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral 7B has 14.5 GB of weights in float16, of 16.1 GB. Only packed weights leave memory for a batch of 8."""
    monkeypatch.setattr("profiler.loading.source.presets", lambda: {"mistral-7b-v0.1": presets()["mistral-7b-v0.1"]})
    with simulated(T4):
        examination = examine("cuda")
    found = {each.name: each for each in examination.findings}
    parts = ("driver", "torch", "packages", "device", "memory", "NVML", "bitsandbytes", "graphs", "fits")
    assert [name for name in parts if not found[name].works] == []
    assert found["device"].says.startswith("Tesla T4, 40 SMs, compute capability 7.5; datasheet T4: 320 GB/s")
    assert found["memory"].says.endswith(" of 16.1 GB")
    assert found["fits"].says == "float16: mistral-7b-v0.1"
    first = "run mistral-7b-v0.1 --quant nf4 --prompt-lens 512 --batch-sizes 1,8"
    assert examination.first.endswith(first)


def test_a_power_limit_has_settled_before_the_ceiling_is_taken() -> None:
    """Both the ceiling and its reported clock are those after the fall."""
    with simulated(capped(0.1), hurried=False):
        machine = machine_for(CARD)
        ceiling = clocked(lambda: measure_gemm(machine, "bfloat16", Effort().ceiling_s), machine)
    assert ceiling.per_s == pytest.approx(CAPPED_SHARE * H100.flops_per_s["bfloat16"], rel=0.03)
    assert ceiling.clock_hz == pytest.approx(CAPPED_SHARE * H100.clock_hz, rel=0.03)


@pytest.mark.slow
def test_the_probe_reads_the_clock_that_its_matmul_had() -> None:
    """Two readings at full clock, two right after 0.2 s of matmuls, which bring the clock to its capped share.

    A part of the probe's matmul is a launch, which has no clock: 38 and 42 µs are 2 % apart in cycles.
    """
    with simulated(capped(0.0)):
        machine = machine_for(CARD)
        probe, rows = DriftProbe(machine), torch.randn(8192, 8192, device=CARD, dtype=torch.bfloat16)
        drift_readings = [probe.look(), probe.look()]
        for _ in range(2):
            start_s = machine.now_s()
            while machine.now_s() < start_s + 0.2:
                rows @ rows
                torch.cuda.synchronize()
            drift_readings.append(probe.look())
    assert drift_readings[-1].compute > 1.05 * drift_readings[0].compute
    assert drift_readings[-1].clock_hz == pytest.approx(CAPPED_SHARE * H100.clock_hz, rel=0.01)
    assert drift(drift_readings, on_gpu=True) < 0.02
    assert drift(drift_readings, on_gpu=False) > 0.05


@pytest.mark.parametrize(("quiet", "low", "high"), [(True, 0.9, 1.1), (False, 1.5, 3.0)], ids=["quiet", "at once"])
def test_counters_of_a_loop_are_those_of_its_kernels(
    quiet: bool, low: float, high: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that keeps the memory busy for a tenth of its second follows work that uses all of it, as a prefill may.

    A sample is up to 0.1 s old: without idle ends, the counters have some of the work before. Streams reach 0.9 of the
    simulated memory's theoretical maximum. GPM metrics exist from Hopper on.
    """
    if not quiet:
        monkeypatch.setattr(telemetry, "_QUIET_S", 0.0)
    for truth in (T4, H100):
        with simulated(truth) as world:
            source, host, world.card.log = nvml_source(CARD), world.host, []
            data = torch.zeros(1 << 30, dtype=torch.uint8, device=CARD)
            while world.card.core.busy_s < 0.1 or host.now_s % nvml.GPM_REFRESH_S < 0.09:
                data.sum()
                torch.cuda.synchronize()
            assert source.counters() is None, "an interval has a start"
            start_s, busy_s = host.now_s, world.card.core.busy_s
            for _ in range(250):
                data.sum()
                torch.cuda.synchronize()
                host.advance(3.2e-3)
            loop_s, busy_s = host.now_s - start_s, world.card.core.busy_s - busy_s
            found = source.counters(loop_s)
            assert source.counters(0.2) is None, "too short"
        assert source.missing == ()
        assert (found is None) == (truth is T4)
    assert low < found.dram / (0.9 * busy_s / loop_s) < high
