"""Find the KV cache, which is called `cache` since 5.24, and the choice of logits in transformers' calls."""

import inspect
from collections.abc import Mapping
from typing import Any

_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""The newest name comes first. Recurrent models use `cache_params` and `state`."""


def cache_of(output: Any) -> Any:
    """Return the cache in a model's output, or None."""
    return next((value for name in _NAMES if (value := getattr(output, name, None)) is not None), None)


def given_cache(named: Mapping[str, Any]) -> Any:
    """Return the cache among a call's keyword arguments, or None."""
    return next((value for name in _NAMES if (value := named.get(name)) is not None), None)


def without_cache(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name not in _NAMES}


def argument_name(model: Any) -> str:
    """Return the name of the cache parameter of the model's `forward`, by default `past_key_values`."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in _NAMES if name in parameters), "past_key_values")


def keeps_last_logits(model: Any) -> bool:
    """Return whether the model's `forward` can leave out all logits but the last, as `generate` asks for."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def has_cache(model: Any) -> bool:
    """Return whether the model, or the decoder inside it, takes a cache."""
    parts = (model, getattr(model, "base_model", model))
    return any(name in inspect.signature(part.forward).parameters for part in parts for name in _NAMES)
