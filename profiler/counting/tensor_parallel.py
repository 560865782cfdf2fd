"""Count one rank's share of a model under tensor parallelism, by transformers' plan."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from profiler.counting.module_kinds import attention_heads, first_of, is_attention
from profiler.counting.operators import Collective, Experts, Linear, ModelWork
from profiler.counting.walk import collapse_numbers, walk
from profiler.data.links import CollectiveKind
from profiler.errors import RequestError
from profiler.loading.source import ModelSource
from profiler.quant.checkpoints import published_format
from profiler.quant.registry import Quant, quantise_modules

# The dimension of a matrix [..., out, in] that each style of a plan cuts (transformers 5.23,
# distributed/tensor_parallel.py).
_CUTS_ROWS = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "embedding_rowwise", "packed_colwise"})
_CUTS_COLUMNS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep", "embedding_colwise", "packed_rowwise"})
# The collective after the module: a sum of partial results, or a concatenation of shards.
_REDUCES = {"rowwise", "rowwise_rep", "rowwise_split_input", "embedding_rowwise", "moe_tp_experts", "all_reduce"}
_GATHERS = {"colwise_gather_output", "colwise_rep", "embedding_colwise"}
_KV_PROJECTIONS = ("k_proj", "v_proj")


def walk_rank(model: Any, ranks: int, rank: int = 0, quant: Quant = "none") -> ModelWork:
    """Return one rank's operators and collectives; `model`, on meta, becomes its share, packed. Raises RequestError."""
    check_ranks(model, ranks)
    named_collectives = list(_collectives(model, ranks))
    params = sum(param.numel() for param in model.parameters())
    keep_share(model, ranks, rank)
    work = walk(quantise_modules(model, quant, model.dtype))
    by_name = {operator.name: operator for operator in work.operators}
    counts = Counter[Collective]()
    for name, named in named_collectives:
        source = by_name.get(name)
        rows = replace(source, count=1) if isinstance(source, Linear | Experts) else None
        counts[replace(named, source=rows)] += 1
    collectives = tuple(replace(collective, count=count) for collective, count in counts.items())
    return replace(work, operators=work.operators + collectives, params=params)


def check_cut(ranks: int, source: ModelSource, quant: Quant = "none") -> None:
    """Raises RequestError for GGUF files and for weights in `quant`, which transformers does not split."""
    if source.kind == "gguf":
        raise RequestError(
            f"--tp {ranks}: transformers cannot split a GGUF file; use a hub id or a folder of safetensors."
        )
    if quant != "none":
        raise RequestError(f"--tp {ranks}: weights in {quant} are packed and cannot be split; use --quant none.")


def check_ranks(model: Any, ranks: int) -> None:
    """Raises RequestError for a model that transformers' plan cannot split into `ranks`."""
    if ranks < 2:
        raise RequestError(f"--tp {ranks} is not possible; use 2 or more ranks, or omit --tp.")
    if published_format(model.config) not in (None, "fp8"):
        raise RequestError(
            f"--tp {ranks}: the weights of this checkpoint are quantised, and packed weights cannot be split; use the"
            " checkpoint that it was quantised from."
        )
    if not _plan(model):
        raise RequestError(
            f"--tp {ranks}: transformers has no tensor parallel plan for {model.config.model_type!r};"
            " run it on one GPU."
        )
    for _, module, query, kv in _split_attentions(model):
        latent = hasattr(module, "kv_b_proj")
        # Copies of KV heads need separate projections of K and V.
        can_copy = ranks % kv == 0 and all(hasattr(module, leaf) for leaf in _KV_PROJECTIONS)
        if query % ranks == 0 and (latent or kv % ranks == 0 or can_copy):
            continue
        fits = [n for n in range(2, query + 1) if query % n == 0 and (latent or kv % n == 0)]
        advice = f"use --tp {', '.join(map(str, fits))}" if fits else "run it on one GPU"
        raise RequestError(f"--tp {ranks}: {query} query heads and {kv} KV heads do not divide by {ranks}; {advice}.")


def replicated_kv_heads(model: Any, ranks: int) -> int:
    """Return the KV heads that ranks copy, if there are more ranks, else 0; call it before `keep_share`."""
    own = (kv for _, module, _, kv in _split_attentions(model) if not hasattr(module, "kv_b_proj"))
    kv = next(own, ranks)
    return kv if ranks > kv else 0


def keep_share(model: Any, ranks: int, rank: int = 0) -> None:
    """Reduce `model` (on meta) to one rank's share by its plan: narrower parameters and fewer heads, same modules.

    With fewer KV heads than ranks, each has a whole one, as in vLLM: transformers (5.23) fails to run such models.
    """
    plan = _plan(model)
    heads: dict[str, int] = {}
    for name, module, query, kv in _split_attentions(model):
        heads |= {f"{name}.{leaf}": kv for leaf in _KV_PROJECTIONS}
        module.num_heads = query // ranks
        module.num_key_value_heads = max(1, kv // ranks)
    shares: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        pieces = min(ranks, heads.get(name, ranks))
        for key, param in list(module.named_parameters(recurse=False)):
            # The scales of FP8 blocks are cut like their weights (transformers 5.23, integrations/finegrained_fp8.py).
            weight = key.removesuffix("_scale_inv").removesuffix("_scale")
            style = plan.get(collapse_numbers(f"{name}.{weight}")) or plan.get(collapse_numbers(name))
            if id(param) not in shares:  # the first module with a tied weight decides how it is cut
                shape = _local_shape(tuple(param.shape), key, style, pieces, rank * pieces // ranks)
                share = torch.empty(shape, dtype=param.dtype, device=param.device)
                shares[id(param)] = nn.Parameter(share, requires_grad=False)
            module._parameters[key] = shares[id(param)]
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape


def _local_shape(shape: tuple[int, ...], key: str, style: str | None, pieces: int, piece: int) -> tuple[int, ...]:
    if style in _CUTS_ROWS:
        dim = -1 if len(shape) == 1 else -2
    elif style in _CUTS_COLUMNS and key != "bias" and len(shape) > 1:
        dim = -1
    else:
        return shape
    dim %= len(shape)
    parts = 2 if style in ("packed_colwise", "packed_rowwise") and len(shape) > 1 else 1
    length = shape[dim] // parts
    full = math.ceil(length / pieces)  # as `torch.chunk` and DTensor's `Shard`: all but the last are equal
    return (*shape[:dim], parts * max(0, min(full, length - piece * full)), *shape[dim + 1 :])


def _plan(model: Any) -> dict[str, str]:
    """Return the style by name of module or parameter (numbers as `*`), as transformers merges it for this class."""
    return dict(getattr(model, "tp_plan", None) or {})


def _split_attentions(model: Any) -> Iterator[tuple[str, Any, int, int]]:
    """Yield attention of which each rank computes a part, as (name, module, query heads, KV heads)."""
    plan = _plan(model)
    for name, module in model.named_modules():
        inner = (collapse_numbers(f"{name}.{part}") for part, _ in module.named_modules())
        if is_attention(module) and any(plan.get(part) == "colwise" for part in inner):  # a projection stays sharded
            query, kv, _ = attention_heads(module, model.config.get_text_config())
            yield name, module, query, kv


def _collectives(model: Any, ranks: int) -> Iterator[tuple[str, Collective]]:
    plan, dtype = _plan(model), model.dtype
    for name, module in model.named_modules():
        short = collapse_numbers(name)
        style = plan.get(short)
        if style not in _REDUCES | _GATHERS:
            continue
        kind: CollectiveKind = "all_reduce" if style in _REDUCES else "all_gather"
        width = first_of(module, "out_features", "embedding_dim") or int(model.config.get_text_config().hidden_size)
        yield (short, Collective(f"{short}.{kind}", dtype, kind, ranks, None, width))
