"""Small configs of every causal-LM type for the second counter: a generic rule, and a few special cases."""

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

PUBLISHED: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("realistic.json").read_text())
"""Configs with the proportions of published models, for types whose defaults hide what differs between layers."""
HEADS = 4
HEAD_DIM = 16
SIZES = {
    "hidden_size": HEADS * HEAD_DIM, "intermediate_size": 96, "ffn_dim": 96, "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96, "num_attention_heads": HEADS, "decoder_attention_heads": HEADS,
    "encoder_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD_DIM, "rotary_dim": 8,
    "vocab_size": 128, "max_position_embeddings": 256, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8,
    "moe_num_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "qk_head_dim": 24, "v_head_dim": 12, "sliding_window": 6, "attention_chunk_size": 6,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MOST_LAYERS = 4
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def configs(model_type: str) -> list[Any]:
    """Return small configs of a type: those with the proportions of published models, or else the shrunk default."""
    small = [AutoConfig.for_model(model_type, **raw) for raw in PUBLISHED.get(model_type, ())]
    for config in small:
        for part in parts(config):
            _known_tokens(part)
    return small or [shrink(AutoConfig.for_model(model_type))]


def shrink(config: Any) -> Any:
    """Return a copy with small widths and few layers, without new keys; towers keep their widths."""
    small = copy.deepcopy(config)
    for part in parts(small):
        _shrink(part)
    for tower in (getattr(small, name, None) for name in getattr(small, "sub_configs", ())):
        for name in ("num_hidden_layers", "depth"):
            if tower is not None and tower is not small.get_text_config() and _get(tower, name):
                _set(tower, name, 1)
    return small


def parts(config: Any) -> list[Any]:
    """Return the config of the model and that of its decoder, which may be one."""
    text = config.get_text_config()
    return list({id(config): config, id(text): text}.values())


def _shrink(config: Any) -> None:
    _shrink_rotary_sections(config)
    for name, value in SIZES.items():
        old = _get(config, name)
        if isinstance(old, int) and not isinstance(old, bool):
            _set(config, name, min(old, value) if old > 0 else old)
    if _get(config, "n_routed_experts") and _get(config, "num_experts_per_tok") is None:
        _set(config, "num_experts_per_tok", SIZES["num_experts_per_tok"])
    for name, value in (("head_dim", HEAD_DIM), ("num_key_value_heads", HEADS)):
        if name in vars(config) and _get(config, name) is None and _get(config, "num_attention_heads"):
            _set(config, name, value)
    if _get(config, "kv_lora_rank"):  # all heads share a latent, and only a part of each is rotated
        _set(config, "num_key_value_heads", HEADS)
        _set(config, "head_dim", SIZES["qk_rope_head_dim"])
    if "is_decoder" in vars(config):
        config.is_decoder = True
    _fewer_layers(config)
    _known_tokens(config)


def _shrink_rotary_sections(config: Any) -> None:
    """Shrink the parts of a head that are rotated by time, height and width, which some models know by default."""
    rope = _get(config, "rope_parameters") or {}
    if "rope_type" in rope:
        total = int(HEAD_DIM // 2 * rope.get("partial_rotary_factor", 1))
        rope["mrope_section"] = [total - 2 * (total // 3), total // 3, total // 3]


def _known_tokens(config: Any) -> None:
    for name in TOKEN_IDS:
        value = _get(config, name)
        if isinstance(value, int) and value >= SIZES["vocab_size"]:
            _set(config, name, 0)


def _fewer_layers(config: Any) -> None:
    """Keep the first layers, and at least one of each kind."""
    types = _get(config, "layer_types")
    layers = _get(config, "num_hidden_layers")
    if types and "layer_types" in vars(config):
        kinds = list(dict.fromkeys(types))
        config.layer_types = (kinds + types)[: max(2, len(kinds))]
        layers = len(config.layer_types)
    elif layers:
        layers = min(layers, MOST_LAYERS)
    if layers:
        _set(config, "num_hidden_layers", layers)
    for name in ("decoder_layers", "encoder_layers"):
        if _get(config, name):
            _set(config, name, layers)


def _get(config: Any, name: str) -> Any:
    """Return the value, or None if there is none or every layer has its own."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _set(config: Any, name: str, value: Any) -> None:
    """Set an attribute, unless the config derives it and refuses a value."""
    with contextlib.suppress(Exception):
        setattr(config, config.attribute_map.get(name, name), value)
