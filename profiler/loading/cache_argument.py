"""The name of the KV cache in transformers' calls: `cache` since 5.24, older names before."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""The newest name first; `cache_params` and `state` are those of recurrent models."""


def cache_of(output: Any) -> Any:
    """The cache that a model hands back; None where it keeps none."""
    return next((value for name in _NAMES if (value := getattr(output, name, None)) is not None), None)


def given_cache(named: Mapping[str, Any]) -> Any:
    """The cache among a call's named arguments; None where none is handed over."""
    return next((value for name in _NAMES if (value := named.get(name)) is not None), None)


def without_cache(named: Mapping[str, Any]) -> dict[str, Any]:
    """A call's named arguments but for the cache."""
    return {name: value for name, value in named.items() if name not in _NAMES}


def argument_name(model: Any) -> str:
    """The name by which the model's `forward` takes a cache; `past_key_values` where it names none."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in _NAMES if name in taken), "past_key_values")
