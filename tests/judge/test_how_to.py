"""The lines to paste name what the libraries have."""

from __future__ import annotations

import importlib
import re

import pytest
from profiler.judge.how_to import how_to

from profiler.quant.registry import FORMATS

HOMES = ("transformers", "torchao.quantization", "torchao.prototype.quantization.int4")


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    "change", [*(name for name in FORMATS if name != "none"), "a static cache", "an 8-bit KV cache"]
)
def test_every_class_of_a_line_exists(change: str, on_gpu: bool) -> None:
    classes = re.findall(r"[A-Z][A-Za-z0-9]+(?:Config|Cache)\b", how_to(change, on_gpu).line)
    assert classes
    for name in classes:
        assert any(hasattr(importlib.import_module(home), name) for home in HOMES), name


def test_every_switch_of_attention_exists() -> None:
    import torch
    from transformers.integrations import sdpa_attention

    assert "enable_cudnn_sdp" in how_to("attention without cuDNN", True).line
    assert callable(torch.backends.cuda.enable_cudnn_sdp)
    assert "use_gqa_in_sdpa" in how_to("attention on repeated heads", True).line
    assert callable(sdpa_attention.use_gqa_in_sdpa)
