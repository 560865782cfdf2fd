"""Language models in plain PyTorch: how they are recognised, and the work that they count."""

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

    for value in (*args, *named.values()):
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype in (torch.long, torch.int):
            return value
    return None


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


def plain_work(model: Any, attention: SeenAttention | None) -> Any:
    """The ModelWork of a plain model: its linears, tables and other parameters, and the attention that was seen.

    The last linear whose width is the vocabulary's is the LM head, and computes one position per sequence.
    """
    from torch import nn

    from profiler.counting.attention import AttentionCore
    from profiler.counting.operators import Elementwise, Embedding, Linear, ModelWork
    from profiler.quant.storage import stored

    dtype = next(model.parameters()).dtype
    tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    vocabulary = max(table.num_embeddings for table in tables)
    head = next((name for name, part in reversed(linears.items()) if part.out_features == vocabulary), "")
    operators: list[Any] = [
        Embedding("table", table.weight.dtype, table.embedding_dim, table.weight.itemsize) for table in tables
    ]
    for name, part in linears.items():
        operators.append(Linear(
            name=name, dtype=part.weight.dtype, weight=stored(part), activation_dtype=dtype,
            group="lm_head" if name == head else "mlp", rows="last" if name == head else "tokens",
        ))  # fmt: skip
    if attention:
        operators.append(AttentionCore(
            name="attention", count=attention.layers, dtype=dtype, query_heads=attention.query_heads,
            kv_heads=attention.kv_heads, qk_dim=attention.qk_dim, v_dim=attention.v_dim,
        ))  # fmt: skip
    counted = {id(each) for part in (*tables, *linears.values()) for each in part.parameters(recurse=False)}
    rest = sum(each.nbytes for each in model.parameters() if id(each) not in counted)
    if rest:
        operators.append(Elementwise("other parameters", dtype, 0, 0, weight_bytes=rest))
    params = sum(each.numel() for each in model.parameters())
    return ModelWork(tuple(operators), params, ())
