"""Models are counted without torchao, and transformers' quantizer still saves with torchao's own function."""

from __future__ import annotations

from importlib import import_module, util

import pytest

pytestmark = pytest.mark.skipif(util.find_spec("torchao") is None, reason="torchao is not installed")


def test_the_replacement_calls_torchaos_function() -> None:
    import torch

    from profiler.loading.config import _flatten_tensor_state_dict

    original = import_module("torchao.prototype.safetensors.safetensors_support").flatten_tensor_state_dict
    state = {"weight": torch.arange(3.0)}
    assert str(_flatten_tensor_state_dict(state)) == str(original(state))
