"""`roofscope doctor` on a card: it reports the card's real properties."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partialmethod
from typing import Any
from unittest import mock

import pytest
import torch

from profiler.checks import installation
from profiler.checks.doctor import examine
from profiler.checks.installation import CheckResult
from profiler.device.machine import CudaMachine
from profiler.errors import RequestError

from .card import Card
from .native import why_not
from .truth import A100, H100, RTX_4090, T4, Truth
from .world import World, simulated, standing_in

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ON_A_CARD = ["attention", "KV lengths", "fp8 by row", "fp8 by tensor", "int8 products", "grouped products"]
ON_A_CARD += ["out of memory", "recovery"]


@pytest.mark.slow
def test_a_t4() -> None:
    """One sequence of a 7B model fits in 16 bits: weights of 14.5 GB and 0.3 GB more, in 15.5 GB of room."""
    with simulated(T4, T4):
        found = examine()
    says = {item.name: item.says for item in found.findings}
    works = {item.name: item.works for item in found.findings}
    assert says["driver"] == "NVIDIA 580.00, supports CUDA up to 13.0"
    assert "Tesla T4, 40 SMs, compute capability 7.5, one of 2" in says["device"]
    assert "datasheet T4: 320 GB/s, 65.0 TFLOP/s in float16, no bfloat16 units" in says["device"]
    assert all(works[name] for name in ("torch", "device", "memory", "NVML", "bitsandbytes", "graphs", "fits"))
    assert works["CUPTI"] is False, "a CPU build of torch records no kernels"
    fits = {(fit.model, fit.precision): fit.fits for fit in found.fits}
    assert {precision for _, precision in fits} == {"float16", "int8", "nf4"}
    assert fits["mistral-7b-v0.1", "float16"], "one sequence fits; the first command has eight, which fit in nf4"
    assert not fits["llama-3.1-8b", "float16"], "16.1 GB"
    assert fits["mistral-7b-v0.1", "nf4"]
    assert fits["smollm2-1.7b", "float16"]
    assert fits["llama-2-7b", "float16"], "13.5 GB of about 14"
    assert not any(fits["mixtral-8x7b", precision] for precision in ("float16", "nf4"))
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
    assert found["device"].works is False
    assert "no kernel image" in found["device"].says
    assert found["memory"].works is False
    assert "other processes hold 80 %" in found["memory"].says
    assert [found[name].works for name in ("NVML", "CUPTI", "bitsandbytes", "compile", "graphs")] == [False] * 5
    assert "pip install 'nvidia-ml-py>=12.535'" in found["NVML"].says
    assert "no kernel image" in found["int8 products"].says
    assert found["int8 products"].says.endswith("int8 has no roof here")


Fault = Callable[[World], contextlib.AbstractContextManager[object]]


def on(truth: Truth, fault: Fault = lambda _: contextlib.nullcontext()) -> dict[str, CheckResult]:
    """Return the checks that only a card gets, by name, on a card with a fault; no compiler and no model is tried."""
    others = mock.patch.object(installation, "compiling")
    no_presets = mock.patch("profiler.loading.source.preset_names", return_value=())
    with simulated(truth) as world, fault(world), others, no_presets:
        found = {item.name: item for item in examine().findings}
    assert [name for name in found if name in ON_A_CARD] == ON_A_CARD
    return {name: found[name] for name in ON_A_CARD}


def bad(found: dict[str, CheckResult]) -> list[str]:
    """Return the names of the checks that fail or are slow."""
    return [item.name for item in found.values() if item.works is False or item.slow]


@pytest.mark.parametrize(
    ("truth", "attention", "absent"),
    [
        # NVIDIA: fp8 from compute capability 8.9 on (Ada, Hopper); int8 from 7.5 on.
        (H100, "kernel cudnn", []),
        (A100, "kernel flash; with a mask memory-efficient", ["fp8 by row", "fp8 by tensor"]),
    ],
    ids=["H100", "A100"],
)
def test_a_healthy_card(truth: Truth, attention: str, absent: list[str]) -> None:
    found = on(truth)
    assert bad(found) == []
    assert [name for name, item in found.items() if item.works is None] == absent
    assert found["attention"].says == attention
    assert found["KV lengths"].says.startswith("a new KV length costs nothing extra")
    assert found["out of memory"].says == "allocations beyond the GPU's memory fail: a run sees the end of memory"
    assert found["recovery"].says == "random numbers, memory and the stream work after a failed capture"


def test_a_t4_has_no_fused_attention_for_grouped_heads() -> None:
    """aten/native/transformers/cuda/sdp_utils.cpp: flash needs compute capability 8.0, memory-efficient equal heads."""
    found = on(T4)
    assert bad(found) == ["attention"]
    assert found["attention"].slow
    assert found["attention"].says.startswith("kernel math; with a mask memory-efficient; math copies K and V")
    assert "use_gqa_in_sdpa = lambda *_: False" in found["attention"].says
    assert 'cache_implementation="static"' in found["attention"].says
    assert found["fp8 by row"] == CheckResult("fp8 by row", None, "no fp8 units: --quant fp8 multiplies in 16 bits")


def test_a_card_without_any_fused_attention() -> None:
    found = on(H100, lambda _: mock.patch.object(torch, "_fused_sdp_choice", return_value=0))
    assert bad(found) == ["attention"]
    assert found["attention"].says.startswith("kernel math; math copies K and V")
    assert "a newer torch" in found["attention"].says


def test_fp8_by_row_that_cublas_does_not_support() -> None:
    """pytorch#192707: torch 2.10 on sm_120."""
    real = torch._scaled_mm

    def by_tensor_only(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs["scale_a"].numel() > 1:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`\nand more")
        return real(*args, **kwargs)

    found = on(H100, lambda _: mock.patch.object(torch, "_scaled_mm", by_tensor_only))
    assert bad(found) == ["fp8 by row"]
    assert found["fp8 by row"].says == (
        "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`; --quant fp8 cannot run here and fp8 has"
        " no roof; use --quant int8wo"
    )


def test_products_that_torch_lacks() -> None:
    lacks = AttributeError("module 'torch' has no such attribute")
    found = on(
        H100,
        lambda _: mock.patch.multiple(
            torch, _int_mm=mock.Mock(side_effect=lacks), _grouped_mm=mock.Mock(side_effect=lacks)
        ),
    )
    assert bad(found) == ["int8 products", "grouped products"]
    for name, means in (
        ("int8 products", "int8 has no roof here"),
        ("grouped products", "mixtures of experts run one expert after the other"),
    ):
        assert found[name].says.startswith(f"module 'torch' has no such attribute; {means}")


def test_grouped_products_without_a_kernel_wait_for_the_card() -> None:
    """aten/native/GroupedMMUtils.h, `_grouped_mm_fallback`: it copies the groups' ends to the host first."""
    real = torch._grouped_mm

    def fallback(left: torch.Tensor, right: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        offs.cpu()
        return real(left, right, offs=offs)

    found = on(A100, lambda _: mock.patch.object(torch, "_grouped_mm", fallback))
    assert bad(found) == ["grouped products"]
    assert found["grouped products"].works
    assert "no --engine graph" in found["grouped products"].says


@pytest.mark.parametrize(("plan_s", "said"), [(22e-3, "22.0 ms"), (50e-6, None)])
def test_the_cost_of_a_new_kv_length(plan_s: float, said: str | None) -> None:
    """cuDNN's plans take 22 ms on a GB10, as reported. 50 us are less than ten calls."""
    found = on(H100.but(plan_s=plan_s))
    assert found["attention"].says == "kernel cudnn"
    assert bad(found) == ([] if said is None else ["KV lengths"])
    if said is not None:
        assert found["KV lengths"].says.startswith(f"each new KV length costs about {said} once")
        assert (
            "cuDNN builds a plan for each; torch.backends.cuda.enable_cudnn_sdp(False) needs none"
            in found["KV lengths"].says
        )


def plain_capture(machine: CudaMachine, work: Callable[[], object], *, returns: bool) -> Callable[[], object]:
    """Capture as in torch's documentation, which restores nothing after a failure; `returns` to the stream before."""
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            work()
    except RuntimeError as error:
        if returns:
            torch.cuda.set_stream(before)
        raise RequestError("this cannot be captured") from error
    return graph.replay


@pytest.mark.parametrize(
    ("release", "says"),
    [
        ((2, 11), "torch draws no random numbers (Offset increment"),
        ((2, 12), "torch does not give back freed memory"),
        ((2, 14), "work goes to another stream"),
    ],
)
def test_releases_of_torch_that_keep_the_state_of_a_failed_capture(release: tuple[int, int], says: str) -> None:
    truth, plain = H100.but(torch_version=release), partialmethod(plain_capture, returns=release < (2, 14))
    found = on(truth, lambda _: mock.patch.object(CudaMachine, "capture", plain))
    assert bad(found) == ["recovery"]
    assert found["recovery"].says.startswith(f"after a failed capture {says}")
    assert found["recovery"].says.endswith("use torch 2.13 or newer")
    assert bad(on(truth)) == [], "our own capture restores that state"


@contextlib.contextmanager
def asked_bytes(spills: bool) -> Iterator[list[int]]:
    """Record every allocation of a gibibyte or more. A card that `spills` refuses none."""
    real, asked = torch.empty, []

    def empty(*size: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(size[0], int) and size[0] >= 1 << 30:
            asked.append(size[0])
            return real(1, **kwargs) if spills else real(*size, **kwargs)
        return real(*size, **kwargs)

    with mock.patch.object(torch, "empty", empty):
        yield asked


def test_memory_that_spills() -> None:
    found = on(RTX_4090, lambda _: asked_bytes(spills=True))
    assert bad(found) == ["out of memory"]
    assert found["out of memory"].says == (
        "allocations beyond the GPU's memory spill to system memory: batch-test cannot see the end of memory; set"
        " 'CUDA - Sysmem Fallback Policy' to 'Prefer No Sysmem Fallback' in Windows' NVIDIA Control Panel"
    )


def test_more_than_the_free_memory_is_requested_once() -> None:
    with asked_bytes(spills=False) as asked:
        on(T4)
    [nbytes] = asked
    free = T4.memory_bytes - T4.taken_bytes
    assert free < nbytes <= free + (1 << 30)


@pytest.mark.parametrize(
    ("truth", "nvml", "says"),
    [
        (T4.but(other_processes=1), True, "not tried: 1 other process uses this GPU"),
        (T4, False, "not tried: NVML does not say which processes use this GPU"),
    ],
)
def test_no_memory_is_requested_if_others_use_the_card(truth: Truth, nvml: bool, says: str) -> None:
    silent: Any = contextlib.nullcontext() if nvml else standing_in("pynvml", None)
    with asked_bytes(spills=False) as asked:
        assert on(truth, lambda _: silent)["out of memory"] == CheckResult("out of memory", None, says)
    assert asked == []


def test_under_wsl_no_memory_is_requested(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    kernel = tmp_path / "version"
    kernel.write_text("Linux version 6.6.87.2-microsoft-standard-WSL2 (root@439a258ad544) (gcc 11.2.0)\n")
    monkeypatch.setattr("profiler.device.device.KERNEL_FILE", kernel)
    found = on(RTX_4090, lambda _: asked_bytes(spills=True))
    assert bad(found) == ["out of memory"]
    assert found["out of memory"].says.startswith("not tried under WSL: allocations beyond the GPU's memory may spill")


def test_an_error_that_is_not_out_of_memory_is_a_line() -> None:
    real = torch.empty

    def empty(*size: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(size[0], int) and size[0] >= 1 << 30:
            raise RuntimeError("CUDA driver error: device not ready")
        return real(*size, **kwargs)

    found = on(H100, lambda _: mock.patch.object(torch, "empty", empty))
    assert bad(found) == ["out of memory"]
    assert found["out of memory"].says.startswith("CUDA driver error: device not ready; a run takes this error")
