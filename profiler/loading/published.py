"""The form that a model is published in: what its own config says of how the checkpoint's weights are stored."""

from __future__ import annotations

import copy
from typing import Any

_FLOAT_FORMS = frozenset({"mxfp4", "fp8", "mxfp8"})
"""Floats with a scale a block, which transformers unpacks into any dtype; integers stay what they are."""


def published_form(config: Any) -> str | None:
    """`quant_method` of the config (mxfp4, fp8, gptq, ...), or None where the checkpoint's weights are dense."""
    options = form_options(config)
    if not options:
        return None
    method = options.get("quant_method")
    return str(getattr(method, "value", method))


def form_options(config: Any) -> dict[str, Any]:
    """What the config says of the published form, as its file has it; empty where the weights are dense."""
    own = getattr(config, "quantization_config", None) or {}
    return own if isinstance(own, dict) else own.to_dict()


def in_dense_form(config: Any) -> Any:
    """A copy of the config, as if its checkpoint held dense weights in the model's dtype."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def as_asked(config: Any, dtype_asked: bool) -> Any:
    """The config in the form to be counted: as published, or dense where a dtype was asked for that replaces it.

    A dtype replaces blocks of floats (MXFP4, FP8); beside packed integers it is that of what stays dense.
    """
    return in_dense_form(config) if dtype_asked and published_form(config) in _FLOAT_FORMS else config
