"""Small configs of every causal-LM type, for the second counter: one generic shrinking, and a few special cases."""

from __future__ import annotations

import copy
from typing import Any

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 6,
    "n_group": 1,
    "topk_group": 1,
}
MOST_LAYERS = 4


def shrink(config: Any) -> Any:
    """A copy with small widths and few layers; what does not exist in a config is not added."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    for part in {id(small): small, id(text): text}.values():
        _shrink(part)
    return small


def _shrink(config: Any) -> None:
    mapping = config.attribute_map
    for name, value in SIZES.items():
        key = mapping.get(name, name)
        old = getattr(config, key, None)
        if isinstance(old, int) and not isinstance(old, bool):
            setattr(config, key, min(old, value) if old > 0 else old)
    if getattr(config, "num_key_value_heads", None) and config.num_key_value_heads > config.num_attention_heads:
        config.num_key_value_heads = config.num_attention_heads
    layers = getattr(config, "num_hidden_layers", None)
    types = getattr(config, "layer_types", None)
    if types:
        kinds = list(dict.fromkeys(types))
        config.layer_types = (kinds + types)[: max(2, len(kinds))]
        setattr(config, mapping.get("num_hidden_layers", "num_hidden_layers"), len(config.layer_types))
    elif layers:
        setattr(config, mapping.get("num_hidden_layers", "num_hidden_layers"), min(layers, MOST_LAYERS))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value >= SIZES["vocab_size"]:
            setattr(config, name, 0)
