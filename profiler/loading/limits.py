"""Reject configs with impossible sizes before a library builds them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from profiler.errors import ModelError

MOST_PARTS = 4096
"""Most layers, experts, heads or labels of a model. The libraries build them one by one, so a huge number never ends.
The deepest published model has 1,000 layers (DeepNet, arXiv 2203.00555), the widest 2,048 experts (Switch-C, arXiv
2101.03961)."""
_PARTS = re.compile(r"(^|[_.])(layers?|blocks?|experts?|heads?|codebooks?|labels?)$|^n_(layer|head)$|(^|_)depths?$")
_LEAST = {
    "vocab_size": 1, "hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "sliding_window": 0,
}  # fmt: skip


def check_claims(content: Mapping[str, Any]) -> None:
    """Check a parsed config.json. Raises ModelError if it has too many parts, or its own weight file name."""
    for name, value in _values(content):
        if name == "transformers_weights":
            raise ModelError(
                f"its config.json names {value!r} as its weights; rename them to model.safetensors and delete that key."
            )
        if isinstance(value, int) and value > MOST_PARTS and _PARTS.search(name):
            raise ModelError(
                f"its configuration says {name} = {value}; roofscope reads models with at most {MOST_PARTS}."
            )


def check_sizes(config: Any) -> None:
    """Raises ModelError for a transformers config with a size below its least; a window of 0 means none.

    An attribute that differs between layers is checked in each.
    """
    text = config.get_text_config()
    layers = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]
    for layer in layers:
        for name, least in _LEAST.items():
            value = getattr(layer, name, None)
            if isinstance(value, int) and value < least:
                raise ModelError(f"its configuration says {name} = {value}, which is not possible.")


def _values(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every scalar in nested mappings and lists, with its key; an element of a list has the key of the list."""
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
