"""A missing package disables only the features that need it; each names the command that installs it in one line."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hidden import hide
from hostile_models import config, gguf, layers, named
from loaded import on_meta

from profiler import packages
from profiler.errors import RequestError
from profiler.loading.config import _flatten_tensor_state_dict, load_config
from profiler.loading.source import resolve
from profiler.quant.checkpoints import published_format
from profiler.quant.registry import can_quantise, need_library

FEATURES = {
    "bitsandbytes": "--quant nf4", "torchao": "--quant int8wo", "gguf": "a GGUF file",
    "compressed-tensors": "a checkpoint stored as compressed-tensors",
}  # fmt: skip


@pytest.mark.parametrize("package", FEATURES)
def test_a_feature_without_its_package_says_how_to_install_it(
    package: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roofscope: Callable[..., Any]
) -> None:
    """The GGUF file has the header of a model of one layer; the checkpoint's weights are 8-bit integers."""
    model = tmp_path / ("tiny.gguf" if package == "gguf" else "tiny")
    if package == "gguf":
        model.write_bytes(gguf(0, 2, named(b"llama") + layers(b"llama", 1)))
    elif package == "compressed-tensors":
        shutil.copytree(tiny_folder, model)
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        options = {"quant_method": package, "format": "pack-quantized", "config_groups": groups}
        config(quantization_config=options)(model)
        assert published_format(load_config(resolve(str(model)))) == package
    hide(monkeypatch, package)
    feature = FEATURES[package]
    done = roofscope("count", *(("gpt2", *feature.split()) if "--" in feature else (str(model),)))
    assert (done.code, done.err.strip()) == (2, f"roofscope: {feature} needs {package}: pip install {package}.")


def test_a_package_that_is_too_old_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao 0.15 to 0.17 have no `PrototypeInt4WeightOnlyConfig`, which int4wo uses on a CPU (torchao 0.18)."""
    monkeypatch.setattr(packages, "requirement_texts", lambda: ["torch>=2.7", "torchao>=0.18; extra == 'formats'"])
    monkeypatch.setattr(metadata, "version", {"torchao": "0.17.0", "torch": "2.13.0"}.__getitem__)
    with pytest.raises(RequestError, match=r"torchao 0\.17\.0 is too old for it: pip install 'torchao>=0\.18'\.$"):
        need_library("int4wo")
    assert not can_quantise("int4wo"), "no lever tries it"


def test_a_torchao_that_does_not_import_with_this_torch_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao 0.18 imports a name that came with torch 2.10; with torch 2.7 to 2.9 that raises ImportError."""
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(RequestError, match=r"torchao .* cannot be imported with torch .*newer torch"):
        on_meta("smollm2-135m", quant="int8wo")


def test_a_bitsandbytes_that_does_not_import_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens if its CUDA runtime is missing."""
    broken = Mock(side_effect=ImportError("libcudart.so.13: cannot open shared object file: No such file or directory"))
    monkeypatch.setattr("profiler.quant.bitsandbytes.import_bitsandbytes", broken)
    with pytest.raises(RequestError, match=r"nf4: bitsandbytes cannot be imported \(libcudart\.so\.13: cannot"):
        on_meta("smollm2-135m", quant="nf4")


def test_the_replacement_of_torchaos_import_calls_torchaos_function() -> None:
    """Models are counted without torchao, and transformers' quantizer still saves with torchao's own function."""
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    state = {"weight": torch.arange(3.0)}
    assert str(_flatten_tensor_state_dict(state)) == str(support.flatten_tensor_state_dict(state))
