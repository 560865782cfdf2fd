"""`roofscope doctor` on a card: it reports the card's real properties."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from profiler.checks import installation
from profiler.checks.doctor import examine

from .card import Card
from .test_roofs import by_tensors
from .truth import A100, H100, T4, Truth
from .world import simulated, standing_in

ON_A_CARD = ["attention", "KV lengths", "fp8 by row", "fp8 by tensor", "int8 products", "grouped products"]


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


def waiting(*args: Any, offs: torch.Tensor, real: Any = torch._grouped_mm) -> torch.Tensor:
    """aten/native/GroupedMMUtils.h, `_grouped_mm_fallback`: it copies the groups' ends to the host first."""
    offs.cpu()
    return real(*args, offs=offs)


LACKS = mock.Mock(side_effect=AttributeError("module 'torch' has no such attribute"))


@pytest.mark.parametrize(
    ("truth", "answers", "bad", "name", "says"),
    [
        (H100, {}, 0, "attention", "kernel cudnn"),
        (H100, {}, 0, "KV lengths", "a new KV length costs nothing extra"),
        (A100, {}, 0, "attention", "kernel flash; with a mask memory-efficient"),
        # sdp_utils.cpp: flash needs compute capability 8.0, memory-efficient equal heads.
        (T4, {}, 1, "attention", "kernel math; with a mask memory-efficient; math copies K and V"),
        (H100, {"_fused_sdp_choice": mock.Mock(return_value=0)}, 1, "attention", "kernel math; math copies K and V"),
        (H100, {"_scaled_mm": by_tensors}, 1, "fp8 by row", "Heuristic`; --quant fp8 cannot run here"),
        (H100, {"_int_mm": LACKS}, 1, "int8 products", "module 'torch' has no such attribute; int8 has no roof here"),
        (H100, {"_grouped_mm": LACKS}, 1, "grouped products", "mixtures of experts run one expert after the other"),
        (A100, {"_grouped_mm": waiting}, 1, "grouped products", "no --engine graph"),
        # cuDNN's plans take 22 ms on a GB10, as reported; 50 us are less than ten calls.
        (H100.but(plan_s=22e-3), {}, 1, "KV lengths", "each new KV length costs about 22.0 ms once"),
        (H100.but(plan_s=50e-6), {}, 0, "KV lengths", ""),
    ],
)
def test_what_does_not_work_is_the_only_bad_line(
    truth: Truth, answers: dict[str, Any], bad: int, name: str, says: str
) -> None:
    """NVIDIA: fp8 from compute capability 8.9 on (Ada, Hopper); int8 from 7.5 on."""
    with (
        simulated(truth),
        mock.patch.multiple(torch, **answers) if answers else contextlib.nullcontext(),
        mock.patch.object(installation, "compiling"),
        mock.patch("profiler.loading.source.preset_names", return_value=()),
    ):
        found = {item.name: item for item in examine().findings if item.name in ON_A_CARD}
    assert list(found) == ON_A_CARD
    assert [item.name for item in found.values() if item.works is False or item.slow] == [name] * bad
    assert says in found[name].says
    absent = [item for item, check in found.items() if check.works is None]
    assert absent == ([] if truth.capability >= (8, 9) else ["fp8 by row", "fp8 by tensor"])
