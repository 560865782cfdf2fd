"""Presets, names and paths are resolved; checkpoints load, spill, or are refused before slow work starts."""

import csv
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from greedy import greedy_tokens
from loaded import loaded, on_meta
from machines import CPU, HOST
from small_models import small_model

import profiler
from profiler.counting.preset_counts import preset_counts
from profiler.counting.walk import walk
from profiler.engines.transformers import EagerEngine
from profiler.errors import ModelError
from profiler.loading import device_map as placement
from profiler.loading.config import load_config
from profiler.loading.meta_model import auto_class
from profiler.loading.request import CheckpointFit, LoadedModel, ModelRequest, most_positions, resolve_dtype
from profiler.loading.source import check_weights, presets, resolve, resolve_weights
from profiler.quant.checkpoints import Gguf, gguf_format
from profiler.run.warnings import fit_warnings

with Path(__file__).with_name("public_params.csv").open(encoding="utf-8", newline="") as file:
    PARAMS = {row["preset"]: int(row["params"]) for row in csv.DictReader(file)}
"""Public parameter counts: the hub's safetensors metadata, or the model's paper."""


def test_presets_have_their_public_parameter_counts() -> None:
    """Their bundled counts are those of their modules (`test_bundled_counts_are_up_to_date`)."""
    for name in presets():
        counts = preset_counts(name)
        assert counts is not None
        assert counts.work.params == PARAMS[name] == presets()[name].params, name


def test_presets_survive_the_config_class() -> None:
    """transformers' config class has every fact of a preset; it may rename one, or move it into a group."""
    moved = {"rope_theta", "rope_scaling", "model_type", "architectures", "dtype"}
    for name in PARAMS:
        card, config = presets()[name], load_config(resolve(name))
        content = config.to_dict()
        for key, value in card.config.items():
            assert key in moved or content.get(key, getattr(config, key, None)) == value, (name, key)
        assert card.source.startswith("https://")


def test_names_are_resolved_without_regard_to_case() -> None:
    assert resolve("SmolLM2-135M").kind == "card"
    assert resolve("Mixtral-8x7B-v0.1").name == "mixtral-8x7b", "the name on the hub"
    hub = resolve("mistralai/Mistral-7B-v0.1")
    assert (hub.kind, hub.preset and hub.preset.params) == ("hub", 7_241_732_096)


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "WhisperForConditionalGeneration", "BertForMaskedLM"])
def test_a_model_that_runs_an_encoder_is_refused(name: str) -> None:
    """transformers would build a decoder of each, without the encoder and what reads its output."""
    config = getattr(transformers, f"{name.partition('For')[0]}Config")(architectures=[name])
    with pytest.raises(ModelError, match=f"{name} is no causal LM"):
        auto_class(config)
    assert auto_class(transformers.BartConfig(architectures=["BartForCausalLM"])) is transformers.AutoModelForCausalLM


@pytest.mark.slow
def test_gguf_is_the_real_model(smollm2: LoadedModel, gguf_file: Path) -> None:
    from transformers import AutoTokenizer

    assert walk(smollm2.module).params == 134_515_008
    assert smollm2.fit == CheckpointFit()
    assert not smollm2.offloaded_bytes
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
    warnings = list(fit_warnings(fit))
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
    (copied / "model.safetensors").rename(copied / "model.pt")  # pickles have this name, and are no checkpoint
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


@pytest.mark.parametrize(("value", "limit"), [(1024, 1024), (-1, None), (0, None), (None, None), ("2048", None)])
def test_an_invalid_number_of_positions_is_no_limit(value: object, limit: int | None) -> None:
    """Some configs write -1 for a model without a limit."""
    text = SimpleNamespace(max_position_embeddings=value)
    assert most_positions(SimpleNamespace(get_text_config=lambda: text)) == limit


# The tiny Llama is in float32. A layer has two norms, and matrices of 2 x 64 x 64 (q, o), 2 x 64 x 32 (k, v) and
# 3 x 64 x 128. There is room for the embedding, one layer, and another one to fetch into, which accelerate reserves.
# The second layer, the last norm and the head go to the disk.
LAYER_BYTES = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
HEAD_BYTES = 4 * (64 + 128 * 64)
FREE_BYTES = 370_000


def spill(monkeypatch: pytest.MonkeyPatch, free_bytes: int = FREE_BYTES) -> None:
    monkeypatch.setattr(placement, "available_bytes", lambda device: free_bytes)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["checkpoint", "random"])
def test_a_model_larger_than_memory_runs_from_the_disk_and_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weights: str, tied: bool
) -> None:
    """A model whose head is the embedding's table is smaller, so that it has half of the room."""
    small_model("Llama", intermediate_size=128, tie_word_embeddings=tied).save_pretrained(tmp_path)
    prompt = torch.arange(1, 17).reshape(1, 16)
    with torch.inference_mode():
        expected = loaded(tmp_path, weights=weights).module(prompt).logits
        spill(monkeypatch, FREE_BYTES // 2 if tied else FREE_BYTES)
        spilled = loaded(tmp_path, weights=weights)
        assert all(torch.equal(spilled.module(prompt).logits, expected) for _ in range(2))
    assert spilled.offloaded_bytes.keys() == {"disk"}
    assert tied or spilled.offloaded_bytes["disk"] == LAYER_BYTES + HEAD_BYTES


@pytest.mark.parametrize(
    ("quant", "free_bytes", "words"),
    [
        ("none", FREE_BYTES, r"the disk has 0\.0 GB free.*--quant nf4"),
        pytest.param("nf4", 20_000, "bitsandbytes weights cannot be offloaded to disk", marks=pytest.mark.slow),
    ],
)
def test_what_neither_memory_nor_disk_can_hold_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Path, quant: str, free_bytes: int, words: str
) -> None:
    spill(monkeypatch, free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
    grid = {"prompt_lens": [8], "batch_sizes": [1]}
    with pytest.raises(ModelError, match=words):
        profiler.profile(str(tiny_folder), quant=quant, weights="random", out=tmp_path / "run", **grid)
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_shares_the_memory_of_its_host_spills_to_it(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    """accelerate's `get_max_memory` has no entry for the host of such a GPU, and opens a context on every GPU."""
    import accelerate.utils

    monkeypatch.setattr(accelerate.utils, "get_max_memory", dict)
    spare_bytes = FREE_BYTES - LAYER_BYTES
    monkeypatch.setattr(placement, "available_bytes", lambda device: spare_bytes if device.type == "cuda" else 1 << 30)
    module = on_meta(str(tiny_folder), torch.float32)
    found = placement.plan_device_map(module, torch.device("cuda", 0))
    assert set(found.device_map.values()) == {"cuda:0", "cpu"}
