"""`roofscope doctor` on a card: it reports the card's real properties."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from profiler.checks.doctor import examine

from .card import Card
from .truth import T4
from .world import simulated, standing_in


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
