"""Limits of what a config may claim, checked before a library builds it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from profiler.errors import ModelError

MOST_PARTS = 4096
"""Layers, experts, heads, labels: each is built one by one. The deepest published model has 1,000 layers (DeepNet,
arXiv 2203.00555), the widest 2,048 experts (Switch-C, arXiv 2101.03961)."""
_PARTS = re.compile(
    r"(^|[_.])(layers?|blocks?|experts?|heads?|codebooks?|labels?)(_count|_count_kv)?$|^n_(layer|head)$|(^|_)depths?$"
)
_AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def check_claims(content: Mapping[str, Any]) -> None:
    """Raises ModelError for a config.json that counts more parts than any model has, holds what is no number, or
    names files of its own choice.
    """
    for name, value in _values(content):
        if isinstance(value, float) and math.isnan(value):
            raise ModelError(f"{name!r} in its config.json is NaN, which is no number.")
        if name == "transformers_weights":
            raise ModelError(
                f"its config.json says that its weights are {value!r}; call them model.safetensors, and leave that out."
            )
        check_count(name, value)


def check_count(name: str, value: object) -> None:
    """Raises ModelError where so many layers, experts or labels are claimed that building them never ends."""
    if isinstance(value, int) and value > MOST_PARTS and _PARTS.search(name):
        raise ModelError(f"its description says {name} = {value}; models of at most {MOST_PARTS} are read.")


def check_sizes(config: Any) -> None:
    """Raises ModelError for a transformers config with a size below 1, or a window below 0 (0: none)."""
    text = config.get_text_config()
    for name, least in (*((name, 1) for name in _AT_LEAST_ONE), ("sliding_window", 0)):
        value = getattr(text, name, None)
        if isinstance(value, int) and value < least:
            raise ModelError(f"its configuration says {name} = {value}, which no model has.")


def _values(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All plain values with the name that they, or the list that holds them, have."""
    inner: Any
    stack = [(name, content)]
    while stack:
        name, inner = stack.pop()
        if isinstance(inner, Mapping):
            stack += [(str(key), value) for key, value in inner.items()]
        elif isinstance(inner, list):
            stack += [(name, value) for value in inner]
        else:
            yield name, inner
