"""The hollow twin: the same architecture with every width shrunk, so that only dispatch is left to time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from profiler.loading.quantise import Quant

# The smallest head that fused attention kernels take on every device (multiples of 8).
_HEAD_DIM = 8
# bitsandbytes stores 4-bit weights in blocks of 64 inputs; narrower layers would take another kernel.
_QUANTISED_HEAD_DIM = 32
_WIDTH = 64
_VOCAB = 256

_EXPERT_WIDTH = 8

_WIDTHS = {
    "intermediate_size": _WIDTH,
    "shared_expert_intermediate_size": _WIDTH,
    "ffn_dim": _WIDTH,
    "n_inner": _WIDTH,
    "moe_intermediate_size": _EXPERT_WIDTH,
}
_EXTRA_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def hollow_config(config: Any, quant: Quant = "none") -> Any:
    """A copy of a transformers config with the same layers and head grouping, and next to no width.

    Everything that decides which operators are dispatched stays: layers, layer types, experts, grouping, windows.
    """
    hollow = copy.deepcopy(config)
    for part in _text_configs(hollow):
        _shrink(part, _HEAD_DIM if quant == "none" else _QUANTISED_HEAD_DIM)
    return hollow


def _text_configs(config: Any) -> Iterator[Any]:
    yield config
    text = config.get_text_config()
    if text is not config:
        yield text


def _shrink(config: Any, head_dim: int) -> None:
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    new_kv = min(kv_heads, 2)
    new_heads = new_kv * (heads // kv_heads)
    _set(config, "num_attention_heads", new_heads)
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = new_kv
    if getattr(config, "head_dim", None):
        config.head_dim = head_dim
    if getattr(config, "kv_lora_rank", None):
        config.kv_lora_rank = _WIDTH
        config.qk_nope_head_dim = config.qk_rope_head_dim = config.v_head_dim = head_dim
        for name in ("qk_head_dim", "head_dim"):
            if getattr(config, name, None):
                setattr(config, name, 2 * head_dim if name == "qk_head_dim" else head_dim)
        if getattr(config, "q_lora_rank", None):
            config.q_lora_rank = _WIDTH
    _set(config, "hidden_size", new_heads * head_dim)
    for name, width in _WIDTHS.items():
        if getattr(config, name, None):
            setattr(config, name, width)
    _set(config, "vocab_size", _VOCAB)
    for name in _EXTRA_TOKENS:
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)


def _set(config: Any, name: str, value: int) -> None:
    """Set under the name that this config class stores it by (GPT-2 says n_embd for hidden_size)."""
    setattr(config, config.attribute_map.get(name, name), value)
