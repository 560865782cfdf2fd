"""Classify modules by their class, parameters and config."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from profiler.quant import storage as formats

_NORM = re.compile(r"norm|layernorm", re.IGNORECASE)
_ATTENTION = re.compile(r"((attention|attn)(sdpa|eager)?|MLA)$", re.IGNORECASE)
_LINEAR_ATTENTION = re.compile(r"Lightning|DeltaNet|DeltaAttention")
_ROUTER = re.compile(r"router|gate$|topk", re.IGNORECASE)
_OTHER_MODALITY = re.compile(
    r"vision|visual|image|audio|speech|video|multi_?modal|^mm_|embed_tokens_extend", re.IGNORECASE
)
_CROSS_ATTENTION = re.compile(r"^(encoder_attn|cross_?attn|cross_?attention)$", re.IGNORECASE)


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is softmax attention: by its class name, with linears but no other attention inside."""
    if not _ATTENTION.search(type(module).__name__) or is_recurrent(module):
        return False
    inner = [part for part in module.modules() if part is not module]
    has_linear = any(formats.is_linear(part) for part in inner)
    return has_linear and not any(_ATTENTION.search(type(part).__name__) for part in inner)


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module is a mixer with a state of fixed size: by its decay `A_log`, or its class name."""
    has_decay = isinstance(getattr(module, "A_log", None), torch.Tensor)
    return has_decay or bool(_LINEAR_ATTENTION.search(type(module).__name__))


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm: by its class name and its weight vector."""
    params = dict(module.named_parameters(recurse=False))
    return "weight" in params and params["weight"].dim() == 1 and bool(_NORM.search(type(module).__name__))


def is_router(module: nn.Module) -> bool:
    """Return whether a module routes tokens to experts: by its class name and a weight matrix [experts, hidden]."""
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2
    return is_matrix and bool(_ROUTER.search(type(module).__name__)) and not formats.is_linear(module)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is routed experts: one bank of 3-D weights (transformers 5), or MLPs (transformers 4)."""
    if isinstance(module, nn.ModuleList):
        first = next(iter(module), None)
        return (
            first is not None
            and "expert" in type(first).__name__.lower()
            and any(formats.is_linear(part) for part in first.modules())
        )
    has_bank = bool(expert_banks(module)) or formats.triton_mxfp4_matrices(module) is not None
    return "expert" in type(module).__name__.lower() and has_bank


def expert_banks(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a layer's expert weights by name: [experts, a, b], or MXFP4 blocks [experts, out, groups, 16]."""
    params = dict(module.named_parameters(recurse=False))
    blocks: dict[str, torch.Tensor] = {name: param for name, param in params.items() if name.endswith("_blocks")}
    return blocks or {name: param for name, param in params.items() if param.dim() == 3 and not formats.is_scale(name)}


def bank_features(name: str, bank: torch.Tensor, hidden_size: int) -> tuple[int, int]:
    """Return (in_features, out_features) of one expert's matrix. Models store either order; the hidden size decides.

    A block of MXFP4 is 16 bytes of two 4-bit weights each (OCP Microscaling Formats, v1.0).
    """
    if bank.dim() == 4:
        return int(bank.shape[2] * bank.shape[3] * 2), int(bank.shape[1])
    first, second = int(bank.shape[1]), int(bank.shape[2])
    out_comes_first = first == hidden_size if "down" in name else second == hidden_size
    return (second, first) if out_comes_first else (first, second)


def not_run_for_text(name: str, module: nn.Module) -> bool:
    """Return whether a text-only step skips the module: other modalities, or cross-attention without an encoder."""
    leaf = name.rpartition(".")[2]
    return bool(
        _OTHER_MODALITY.search(leaf) or _CROSS_ATTENTION.search(leaf) or "CrossAttention" in type(module).__name__
    )


def caches_latent(model: nn.Module) -> bool:
    """Return whether the KV cache stores MLA's latent.

    transformers 5 does, and expands it again in each step; older versions cache the expanded heads.
    """
    return any(hasattr(module, "expand_kv") for module in model.modules())


def over_context(name: str, model: nn.Module) -> bool:
    """Return whether each step runs a linear over the whole cache: for MLA's latent and Doge's dynamic mask."""
    if name.endswith("kv_b_proj"):
        return caches_latent(model)
    return name.endswith("self_attn.dt_proj")


def base_prefix(model: Any) -> str:
    """Return the prefix of the decoder's modules in a causal LM (`model.`), or "" if the decoder is the model."""
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if prefix and hasattr(model, prefix) else ""


def window_of(config: Any, module: Any) -> int | None:
    """Return the keys that a query of this layer may see, from the layer's type, the layer or the config.

    None means no limit.
    """
    if getattr(module, "is_sliding", None) is False:
        return None
    layer_types = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if layer_types and isinstance(index, int) and index < len(layer_types):
        kind = layer_types[index]
        if kind == "full_attention":
            return None
        if kind == "chunked_attention":
            return _positive(getattr(config, "attention_chunk_size", None))
    if hasattr(module, "sliding_window"):
        return _positive(module.sliding_window)
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return _positive(getattr(config, "sliding_window", None))


def _positive(value: Any) -> int | None:
    return int(value) if value else None


def attention_heads(module: Any, config: Any) -> tuple[int, int, int]:
    """Return (query heads, KV heads, head dim) of an attention module, from the module or else the config."""
    query_heads = int(first_of(module, "num_heads", "num_attention_heads", "n_heads") or config_query_heads(config))
    groups = first_of(module, "num_key_value_groups")
    kv_heads = first_of(module, "num_key_value_heads", "num_kv_heads")
    kv_heads = int(kv_heads or (query_heads // groups if groups else config_kv_heads(config)))
    head_dim = int(first_of(module, "head_dim", "head_size", "attention_head_size") or config_head_dim(config))
    return query_heads, kv_heads, head_dim


def config_query_heads(config: Any) -> int:
    """Return the number of query heads in the config."""
    return int(first_of(config, "num_attention_heads", "n_head", "num_heads") or 1)


def config_kv_heads(config: Any) -> int:
    """Return the number of KV heads in the config, by default that of the query heads."""
    return int(first_of(config, "num_key_value_heads", "num_kv_heads", "n_head_kv") or config_query_heads(config))


def config_head_dim(config: Any) -> int:
    """Return the head dim in the config, by default hidden size over query heads."""
    return int(first_of(config, "head_dim", "kv_channels") or config.hidden_size // config_query_heads(config))


def first_of(owner: Any, *names: str) -> Any:
    """Return the first attribute of `owner` that is not None, or None."""
    return next((value for name in names if (value := _attribute(owner, name)) is not None), None)


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute or None; a config whose layers differ raises for values of a single layer."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def activation_dtype(model: Any) -> torch.dtype:
    """Return the dtype of the activations between layers."""
    dtype: torch.dtype = model.dtype
    return dtype if dtype.is_floating_point else torch.float16
