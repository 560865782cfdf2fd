"""Resolving presets, names and paths."""

from __future__ import annotations

import pytest
import transformers
from cases import slow_except
from loaded import walked

from profiler.errors import ModelError
from profiler.loading.config import load_config
from profiler.loading.meta_model import auto_class
from profiler.loading.source import load_preset, preset_names, resolve

# Public parameter counts: the hub's safetensors metadata, or the model's paper.
PARAMS = {
    "smollm2-135m": 134_515_008, "smollm2-1.7b": 1_711_376_384, "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b-v0.1": 7_241_732_096, "mistral-7b-v0.2": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552,
    "llama-2-7b": 6_738_415_616, "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-7b": 7_615_616_512, "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624, "gemma-2-9b": 9_241_705_984, "phi-3-mini": 3_821_079_552, "gpt2": 124_439_808,
    "mixtral-8x7b": 46_702_792_704, "deepseek-v2-lite": 15_706_484_224, "gpt-oss-20b": 20_914_757_184,
}  # fmt: skip


@pytest.mark.parametrize("name", slow_except(("gpt2", "mistral-7b-v0.1", "mixtral-8x7b"), preset_names()))
def test_preset_builds_to_its_public_parameter_count(name: str) -> None:
    assert walked(name).params == PARAMS[name] == load_preset(name).params


def test_presets_survive_the_config_class() -> None:
    """transformers' config class has every fact of a preset; it may rename one, or move it into a group."""
    moved = {"rope_theta", "rope_scaling", "model_type", "architectures", "dtype"}
    for name in PARAMS:
        card, config = load_preset(name), load_config(resolve(name))
        content = config.to_dict()
        for key, value in card.config.items():
            assert key in moved or content.get(key, getattr(config, key, None)) == value, (name, key)
        assert card.source.startswith("https://")


def test_names_are_resolved_without_regard_to_case() -> None:
    assert resolve("SmolLM2-135M").kind == "card"
    hub = resolve("mistralai/Mistral-7B-v0.1")
    assert (hub.kind, hub.preset and hub.preset.params) == ("hub", 7_241_732_096)


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "WhisperForConditionalGeneration", "BertForMaskedLM"])
def test_a_model_that_runs_an_encoder_is_refused(name: str) -> None:
    """transformers would build a decoder of each, without the encoder and what reads its output."""
    config = getattr(transformers, f"{name.partition('For')[0]}Config")(architectures=[name])
    with pytest.raises(ModelError, match=f"{name} is no causal LM"):
        auto_class(config)
    assert auto_class(transformers.BartConfig(architectures=["BartForCausalLM"])) is transformers.AutoModelForCausalLM
