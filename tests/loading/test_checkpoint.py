"""Checkpoints: a real GGUF file, a real safetensors folder, and refusals before slow work starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from greedy import greedy_tokens
from loaded import loaded
from machines import CPU, HOST
from small_models import small_model

from profiler.counting.walk import walk
from profiler.engines.transformers import EagerEngine
from profiler.errors import ModelError, RequestError
from profiler.loading.config import load_config
from profiler.loading.request import CheckpointFit, LoadedModel, ModelRequest, most_positions, resolve_dtype
from profiler.loading.source import check_weights, resolve, resolve_weights
from profiler.quant.checkpoints import Gguf, gguf_format
from profiler.run.warnings import fit_warnings


@pytest.mark.slow
def test_gguf_is_the_real_model(smollm2: LoadedModel, gguf_file: Path) -> None:
    from transformers import AutoTokenizer

    assert walk(smollm2.module).params == 134_515_008
    assert smollm2.fit == CheckpointFit()
    assert not smollm2.offloaded
    assert smollm2.unpacked_from == "GGUF (Q4_1, Q8_0)", "its name says Q4_1, and its embedding table is in Q8_0"
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(greedy_tokens(EagerEngine(smollm2.module, HOST), ids, 1)[0, 0]) == " Paris"


@pytest.mark.parametrize(("architecture", "packed"), [("lfm2", True), ("qwen35", True), ("llama", False)])
def test_gguf_architectures_that_transformers_loads_packed(tmp_path: Path, architecture: str, packed: bool) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    file = tmp_path / "model.gguf"
    writer = GGUFWriter(file, architecture)
    writer.add_tensor("output.weight", np.zeros((4, 34), np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf_format(file) == Gguf(("Q8_0",), packed, "GGUF (Q8_0)")


@pytest.mark.parametrize(
    ("layers", "missing", "unused"), [(2, 0, 0), (3, 9, 0), (1, 0, 9)], ids=["alike", "too few", "too many"]
)
def test_a_checkpoint_of_another_depth_gives_a_warning(tmp_path: Path, layers: int, missing: int, unused: int) -> None:
    """A Llama layer has nine tensors: seven matrices and two norms."""
    model = small_model("Llama")
    model.save_pretrained(tmp_path)
    model.config.num_hidden_layers = layers
    model.config.save_pretrained(tmp_path)
    fit = loaded(tmp_path).fit
    assert (len(fit.missing), len(fit.unused)) == (missing, unused)
    warnings = fit_warnings(fit)
    assert len(warnings) == (layers != 2)
    assert all("9 tensors (first: model.layers." in line for line in warnings)


def test_a_folder_loads_its_weights(tiny_folder: Path) -> None:
    from transformers import LlamaForCausalLM

    assert resolve_weights(resolve(str(tiny_folder)), "auto") == "checkpoint"
    expected = LlamaForCausalLM.from_pretrained(tiny_folder).lm_head.weight
    assert torch.equal(loaded(tiny_folder).module.lm_head.weight, expected)


def _check(folder: Path, **allowed: bool) -> None:
    check_weights(ModelRequest(resolve(str(folder)), CPU, torch.float32, weights="checkpoint", **allowed))  # type: ignore[arg-type]


def test_no_weights_and_a_pickle_without_its_flag_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    (copied / "model.safetensors").unlink()
    assert resolve_weights(resolve(str(copied)), "auto") == "random"
    with pytest.raises(ModelError, match="--weights random"):
        _check(copied)
    (copied / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match="--allow-pickle"):
        _check(copied)
    _check(copied, allow_pickle=True)


def test_dtype_choice(tiny_folder: Path) -> None:
    config = load_config(resolve(str(tiny_folder)))
    assert resolve_dtype("auto", "none", CPU, config) == torch.float32
    assert resolve_dtype("auto", "nf4", CPU, config) == torch.bfloat16
    with pytest.raises(RequestError, match="--quant nf4"):
        resolve_dtype("float32", "nf4", CPU, config)
    with pytest.raises(RequestError, match="float7"):
        resolve_dtype("float7", "none", CPU, config)


@pytest.mark.parametrize(("value", "limit"), [(1024, 1024), (-1, None), (0, None), (None, None), ("2048", None)])
def test_an_invalid_number_of_positions_is_no_limit(value: object, limit: int | None) -> None:
    """Some configs write -1 for a model without a limit."""
    text = SimpleNamespace(max_position_embeddings=value)
    assert most_positions(SimpleNamespace(get_text_config=lambda: text)) == limit
