"""`roofscope doctor` on a card: what it finds is what the card is."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from profiler.job.doctor import examine

from .card import Card
from .native import why_not
from .truth import T4
from .world import simulated, standing_in

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.mark.slow
def test_a_t4() -> None:
    """16 bits of a 7B model do not fit, 4 bits do."""
    with simulated(T4, T4):
        found = examine()
    says = {item.name: item.says for item in found.findings}
    works = {item.name: item.works for item in found.findings}
    assert says["driver"] == "NVIDIA 580.00, knows CUDA up to 13.0"
    assert "Tesla T4, 40 SMs, compute capability 7.5, one of 2" in says["card"]
    assert "datasheet T4: 320 GB/s, 65.0 TFLOP/s in float16, no bfloat16 units" in says["card"]
    assert all(works[name] for name in ("torch", "card", "memory", "NVML", "bitsandbytes", "graphs", "fits"))
    assert works["CUPTI"] is False, "a CPU build of torch has no kernels to see"
    fits = {(fit.model, fit.precision): fit.fits for fit in found.fits}
    assert {precision for _, precision in fits} == {"float16", "int8", "nf4"}
    assert not fits["mistral-7b-v0.1", "float16"]
    assert fits["mistral-7b-v0.1", "nf4"]
    assert fits["smollm2-1.7b", "float16"]
    assert fits["llama-2-7b", "float16"], "13.5 GB of some 14"
    assert not any(fits["mixtral-8x7b", precision] for precision in ("float16", "nf4"))
    assert found.first == "roofscope run mistral-7b-v0.1 --quant nf4 --prompt-lens 512 --batch-sizes 1,8 --budget 30"


def test_a_card_on_which_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without kernels for an old card, a neighbour that holds it, no NVML: each is a line."""
    error = torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device")
    monkeypatch.setattr("profiler.job.doctor.card_names", lambda: ("gpt2",))
    dead = mock.patch.object(Card, "launch", side_effect=error)
    with simulated(T4.but(taken_bytes=12 << 30)), standing_in("pynvml", None), dead:
        found = {item.name: item for item in examine().findings}
    assert found["card"].works is False
    assert "no kernel image" in found["card"].says
    assert found["memory"].works is False
    assert "others hold 80 %" in found["memory"].says
    assert [found[name].works for name in ("NVML", "CUPTI", "bitsandbytes", "compile", "graphs")] == [False] * 5
