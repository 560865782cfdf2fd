"""Count a model without its weights, on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from profiler.counting.attention import AttentionCore
from profiler.counting.attention_kernel import attention_path
from profiler.counting.operators import ModelWork
from profiler.counting.preset_counts import CountedModel
from profiler.counting.tensor_parallel import check_cut, walk_rank
from profiler.counting.walk import walk
from profiler.facts.step import ExecutionPath
from profiler.loading.config import load_config
from profiler.loading.device_map import planned_weight_bytes
from profiler.loading.meta_model import build_on_meta
from profiler.loading.request import dtype_name, in_16_bits, model_dtype, most_positions
from profiler.loading.source import ModelSource
from profiler.quant.checkpoints import published_format, requested_form
from profiler.quant.registry import Quant, known_quant


def counted_on_meta(
    source: ModelSource,
    dtype: str,
    quant: str,
    *,
    rented: bool = False,
    ranks: int = 1,
    trust_remote_code: bool = False,
) -> CountedModel:
    """Count a model, or the share of the tensor-parallel rank that has most, from its config.

    `dtype` `auto` is the model's own; with `rented`, 16 bits if its own is wider. Raises RequestError or ModelError.
    """
    known = known_quant(quant)
    if ranks > 1:
        check_cut(ranks, source, known)
    config = requested_form(load_config(source, trust_remote_code), dtype != "auto")
    compute_dtype = model_dtype(dtype, config)
    if rented and dtype == "auto":
        compute_dtype = in_16_bits(compute_dtype)
    return counted_module(build_on_meta(config, compute_dtype, known), config, compute_dtype, known, ranks)


def counted_module(module: nn.Module, config: Any, dtype: torch.dtype, quant: Quant, ranks: int = 1) -> CountedModel:
    """Count a model on meta. With `ranks` above 1, `module` becomes the share of the rank that has most.

    Raises RequestError for a model that cannot be split into `ranks`.
    """
    # Models whose scores need more than `sdpa` computes do not support it: caps (Gemma-2), sinks (gpt-oss).
    supports_sdpa = getattr(module, "_supports_sdpa", True)
    return CountedModel(
        walk(module) if ranks == 1 else walk_rank(module, ranks),
        planned_weight_bytes(module),
        dtype_name(dtype),
        published_format(config) if quant == "none" else None,
        "sdpa" if supports_sdpa else "eager",
        most_positions(config),
    )


def path_here(
    module: nn.Module, work: ModelWork, device: torch.device, dtype: torch.dtype, query: int
) -> ExecutionPath:
    """Return how a prefill of `query` tokens of a model on meta will run on a device of this machine."""
    attention = getattr(module.config.get_text_config(), "_attn_implementation", None) or "sdpa"
    cores = work.of_kind(AttentionCore)
    return attention_path(attention, cores, device, dtype, query=query, keys=query)
