"""Models are counted without torchao, and transformers' quantizer still saves with torchao's own function."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module, util

import pytest

SCRIPT = """
import sys
from profiler.counting.count import counted_on_meta
from profiler.loading.source import resolve

counted_on_meta(resolve("smollm2-135m"), "auto", "none")
print(sorted(name for name in sys.modules if name.split(".")[0] == "torchao"))
"""

pytestmark = pytest.mark.skipif(util.find_spec("torchao") is None, reason="torchao is not installed")


@pytest.mark.slow
def test_counting_a_model_does_not_import_torchao() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_the_replacement_calls_torchaos_function() -> None:
    import torch

    from profiler.loading.config import _flatten_tensor_state_dict

    original = import_module("torchao.prototype.safetensors.safetensors_support").flatten_tensor_state_dict
    state = {"weight": torch.arange(3.0)}
    assert str(_flatten_tensor_state_dict(state)) == str(original(state))
