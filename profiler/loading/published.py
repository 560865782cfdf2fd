"""The form that a model is published in: what its own config says of how the checkpoint's weights are stored."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
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


@dataclass(frozen=True)
class Gguf:
    """How a GGUF file holds its weights."""

    types: tuple[str, ...]
    """ggml's names of its quantised types, that of the most weights first; empty: floats alone, or not to be read."""
    kept_by_kernels: bool
    """Whether transformers keeps the blocks of this architecture where a kernel for the device can be had."""

    @property
    def name(self) -> str:
        return f"GGUF ({', '.join(self.types)})" if self.types else "GGUF"


def gguf_form(file: Path) -> Gguf:
    """How `file` holds its weights, from its header alone.

    transformers 5.23 (quantizers/quantizer_gguf.py) keeps blocks for the architectures of `GGUF_ARCHS` alone, with the
    package `kernels` and a kernel published for the device, which no CPU has; all others it dequantises at loading.
    """
    try:
        from gguf import GGMLQuantizationType
        from transformers.integrations.gguf import GGUF_ARCHS, GgufHeader

        header = GgufHeader.from_file(str(file))
    except (ImportError, ValueError):  # an older transformers, or a type of blocks that its reader does not know
        return Gguf((), False)
    weights: Counter[str] = Counter()
    for tensor in header.tensors:
        weights[GGMLQuantizationType(tensor.ggml_type).name] += prod(tensor.shape)
    types = tuple(name for name, _ in weights.most_common() if name not in _GGUF_FLOATS)
    return Gguf(types, header.architecture in GGUF_ARCHS)


_GGUF_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
