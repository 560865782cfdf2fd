"""`roofscope doctor` on a card: it reports the card's real properties."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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
from .world import simulated, standing_in

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


def on(truth: Truth, *within: Any, **answers: Any) -> dict[str, CheckResult]:
    """Return the checks that only a card gets, by name, `within` some contexts and with these functions of torch."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(simulated(truth))
        for context in within:
            stack.enter_context(context)
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch, name, answer))
        stack.enter_context(mock.patch.object(installation, "compiling"))
        stack.enter_context(mock.patch("profiler.loading.source.preset_names", return_value=()))
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


def by_tensor_only(*args: Any, real: Any = torch._scaled_mm, **kwargs: Any) -> torch.Tensor:
    """torch 2.10 on sm_120 (pytorch#192707)."""
    if kwargs["scale_a"].numel() > 1:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`\nand more")
    return real(*args, **kwargs)


def waiting(*args: Any, offs: torch.Tensor, real: Any = torch._grouped_mm) -> torch.Tensor:
    """aten/native/GroupedMMUtils.h, `_grouped_mm_fallback`: it copies the groups' ends to the host first."""
    offs.cpu()
    return real(*args, offs=offs)


def large(answer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torch.empty with another answer for a gibibyte or more."""
    real = torch.empty
    return lambda *size, **kw: (answer if isinstance(size[0], int) and size[0] >= 1 << 30 else real)(*size, **kw)


def spilling(*_: int, real: Any = torch.empty, **kwargs: Any) -> torch.Tensor:
    return real(1, **kwargs)


LACKS = mock.Mock(side_effect=AttributeError("module 'torch' has no such attribute"))
NOT_READY = mock.Mock(side_effect=RuntimeError("CUDA driver error: device not ready"))


@pytest.mark.parametrize(
    ("truth", "answers", "name", "says"),
    [
        # sdp_utils.cpp: flash needs compute capability 8.0, memory-efficient equal heads.
        (T4, {}, "attention", "kernel math; with a mask memory-efficient; math copies K and V"),
        (H100, {"_fused_sdp_choice": mock.Mock(return_value=0)}, "attention", "kernel math; math copies K and V"),
        (
            H100,
            {"_scaled_mm": by_tensor_only},
            "fp8 by row",
            "`cublasLtMatmul`; --quant fp8 cannot run here and fp8 has",
        ),
        (H100, {"_int_mm": LACKS}, "int8 products", "module 'torch' has no such attribute; int8 has no roof here"),
        (H100, {"_grouped_mm": LACKS}, "grouped products", "mixtures of experts run one expert after the other"),
        (A100, {"_grouped_mm": waiting}, "grouped products", "no --engine graph"),
        # cuDNN's plans take 22 ms on a GB10, as reported; 50 us are less than ten calls.
        (H100.but(plan_s=22e-3), {}, "KV lengths", "each new KV length costs about 22.0 ms once"),
        (H100.but(plan_s=50e-6), {}, "", ""),
        (
            RTX_4090,
            {"empty": large(spilling)},
            "out of memory",
            "spill to system memory: batch-test cannot see the end",
        ),
        (H100, {"empty": large(NOT_READY)}, "out of memory", "CUDA driver error: device not ready; a run takes"),
    ],
)
def test_what_does_not_work_is_the_only_bad_line(truth: Truth, answers: dict[str, Any], name: str, says: str) -> None:
    found = on(truth, **answers)
    assert bad(found) == ([name] if name else [])
    assert not name or says in found[name].says


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
    found = on(truth, mock.patch.object(CudaMachine, "capture", plain))
    assert bad(found) == ["recovery"]
    assert found["recovery"].says.startswith(f"after a failed capture {says}")
    assert found["recovery"].says.endswith("use torch 2.13 or newer")
    assert bad(on(truth)) == [], "our own capture restores that state"


@pytest.mark.parametrize(
    ("truth", "within", "says"),
    [
        (T4, [], "allocations beyond the GPU's memory fail: a run sees the end of memory"),
        (T4.but(other_processes=1), [], "not tried: 1 other process uses this GPU"),
        (T4, [standing_in("pynvml", None)], "not tried: NVML does not say which processes use this GPU"),
    ],
    ids=["alone", "next to another", "without NVML"],
)
def test_more_than_the_free_memory_is_requested_once_if_no_other_uses_the_card(
    truth: Truth, within: list[Any], says: str
) -> None:
    real, asked = torch.empty, []
    empty = large(lambda *size, **kwargs: asked.append(size[0]) or real(*size, **kwargs))  # type: ignore[func-returns-value]
    assert on(truth, *within, empty=empty)["out of memory"].says == says
    free = T4.memory_bytes - T4.taken_bytes
    assert [free < nbytes <= free + (1 << 30) for nbytes in asked] == ([] if "not tried" in says else [True])


def test_under_wsl_no_memory_is_requested(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    kernel = tmp_path / "version"
    kernel.write_text("Linux version 6.6.87.2-microsoft-standard-WSL2 (root@439a258ad544) (gcc 11.2.0)\n")
    monkeypatch.setattr("profiler.device.device.KERNEL_FILE", kernel)
    found = on(RTX_4090)
    assert bad(found) == ["out of memory"]
    assert found["out of memory"].says.startswith("not tried under WSL: allocations beyond the GPU's memory may spill")
