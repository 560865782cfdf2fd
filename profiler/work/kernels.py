"""Which attention kernel torch really picks, asked of torch itself for the very shapes and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast, get_args

import torch

from profiler.work.attention import AttentionCore
from profiler.work.step import UNFUSED_KERNEL, Attention, ExecutionPath
from profiler.work.walk import linear_modules

_BACKENDS = {0: UNFUSED_KERNEL, 1: "flash", 2: "memory-efficient", 3: "cudnn", 4: "overrideable"}


def attention_path(
    attention: str, cores: Sequence[AttentionCore], device: torch.device, dtype: torch.dtype, *, query: int, keys: int
) -> ExecutionPath:
    """How transformers' attention interface of this name executes a step on this device: asked of torch, not assumed.

    `query` new tokens a sequence see `keys`; one layer that falls back to the math path counts for all.
    """
    if attention not in get_args(Attention):
        return ExecutionPath()
    path = ExecutionPath(attention=cast("Attention", attention))
    if attention != "sdpa" or not cores:
        return path

    def pick(masked: bool) -> str:
        found = {sdpa_kernel(core, device, dtype, query=query, keys=keys, masked=masked) for core in cores}
        return UNFUSED_KERNEL if UNFUSED_KERNEL in found else "+".join(sorted(found))

    return replace(path, kernel=pick(False), masked_kernel=pick(True))


# What is asked about is really allocated, and no kernel is chosen by a length beyond this, nor by how much wider than
# this a head is, but for whether its width is a multiple.
_LONGEST_ASKED = 1 << 16
_WIDEST_ASKED = 1 << 10


def sdpa_kernel(
    core: AttentionCore, device: torch.device, dtype: torch.dtype, *, query: int, keys: int, masked: bool
) -> str:
    """The kernel behind `scaled_dot_product_attention` for one sequence: flash, memory-efficient, cudnn or math.

    Asks `torch._fused_sdp_choice`, which is what the call itself consults; nothing is computed. As in transformers,
    several new tokens are marked causal when no mask is passed, and grouped heads are passed with `enable_gqa` or, when
    there is a mask, repeated (several new tokens) or packed into the queries (one).
    """
    query, keys = min(query, _LONGEST_ASKED), min(keys, _LONGEST_ASKED)
    grouped = core.query_heads != core.kv_heads
    in_kernel = grouped and not masked and core.groups_in_kernel
    heads, kv_heads, rows = core.query_heads, core.kv_heads, query
    if grouped and not in_kernel:
        heads, kv_heads = (heads, heads) if query > 1 else (kv_heads, kv_heads)
        rows = query if query > 1 else core.query_heads // core.kv_heads
    qk_dim, v_dim = (dim if dim <= _WIDEST_ASKED else _WIDEST_ASKED + dim % 64 for dim in (core.qk_dim, core.v_dim))
    q = torch.empty(1, heads, rows, qk_dim, device=device, dtype=dtype)
    k = torch.empty(1, kv_heads, keys, qk_dim, device=device, dtype=dtype)
    v = torch.empty(1, kv_heads, keys, v_dim, device=device, dtype=dtype)
    mask = torch.empty(1, 1, 1, keys, device=device, dtype=torch.bool).expand(1, 1, rows, keys) if masked else None
    choice = torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=query > 1 and not masked, enable_gqa=in_kernel)
    return _BACKENDS.get(int(choice), UNFUSED_KERNEL)


def outlier_columns(model: Any) -> dict[str, float]:
    """Columns with outliers that LLM.int8() found in its last step, a mean over the layers of each linear operator.

    Only a step that has run knows them: they are the columns of its input that hold a value of 6 or more.
    """
    found: dict[str, float] = {}
    for (name, _ins, _outs), modules in linear_modules(model).items():
        columns = [getattr(getattr(module, "state", None), "idx", None) for module in modules]
        counts = [index.numel() for index in columns if isinstance(index, torch.Tensor)]
        if any(counts):
            found[name] = sum(counts) / len(modules)
    return found
