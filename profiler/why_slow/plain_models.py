"""Language models in plain PyTorch: how they are recognised, and what of their calls is recorded."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from profiler.why_slow.kept_arguments import Arguments

_FEWEST_LINEARS = 2


def is_language_model(module: Any) -> bool:
    """Whether a module is a language model without a class of transformers.

    It has a table of embeddings and some linears. A wrapper around a model of transformers is not one.
    """
    from torch import nn

    transformers = sys.modules.get("transformers.modeling_utils")
    parts = list(module.modules())
    if transformers is not None and any(isinstance(part, transformers.PreTrainedModel) for part in parts):
        return False
    has_table = any(isinstance(part, nn.Embedding) for part in parts)
    return has_table and sum(isinstance(part, nn.Linear) for part in parts) >= _FEWEST_LINEARS


def is_plain(model: Any) -> bool:
    """Whether a recorded model is no model of transformers."""
    return not hasattr(model, "get_output_embeddings")


def token_ids(args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """The first argument that is a tensor of whole numbers [batch, tokens]; None if there is none."""
    import torch

    tensors = (value for value in (*args, *named.values()) if isinstance(value, torch.Tensor))
    return next((each for each in tensors if each.dim() == 2 and each.dtype in (torch.long, torch.int)), None)


def repeatable(args: tuple[Any, ...], named: dict[str, Any]) -> Arguments | None:
    """The arguments without the numbers of a cache: of tensors in lists, tuples and dictionaries, shapes stay.

    None if one is an object of another class, which may have changed since.
    """
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    if not all(isinstance(value, torch.Tensor | int | float | str | None) for value in tree_leaves((args, named))):
        return None

    def shape_of(each: Any) -> Any:
        like = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
        return like if each.is_floating_point() else each

    def without_values(value: Any) -> Any:
        return tree_map_only(torch.Tensor, shape_of, value) if isinstance(value, list | tuple | dict) else value

    return tuple(map(without_values, args)), {name: without_values(value) for name, value in named.items()}


@dataclass(frozen=True)
class SeenAttention:
    """Calls of scaled_dot_product_attention within one forward of a plain model."""

    layers: int
    query_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    context_len: int
    """Keys of the first call that are not those of its own queries."""


def attention_of(query: Any, key: Any, value: Any, *_: Any, **_options: Any) -> SeenAttention:
    """The attention of one call, whose arguments are [batch, heads, tokens, width]."""
    beyond = max(0, key.shape[-2] - query.shape[-2])
    return SeenAttention(1, query.shape[-3], key.shape[-3], query.shape[-1], value.shape[-1], beyond)
