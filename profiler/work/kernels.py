"""Which attention kernel torch really picks, asked of torch itself for the very shapes and dtype."""

from __future__ import annotations

import torch

from profiler.work.attention import AttentionCore

_BACKENDS = {0: "math", 1: "flash", 2: "memory-efficient", 3: "cudnn", 4: "overrideable"}


def sdpa_kernel(core: AttentionCore, device: torch.device, dtype: torch.dtype, *, query: int, context: int) -> str:
    """The kernel behind `scaled_dot_product_attention` for one sequence: flash, memory-efficient, cudnn or math.

    Asks `torch._fused_sdp_choice`, which is what the call itself consults; nothing is computed. As in transformers,
    grouped heads are passed with `enable_gqa` and a prefill into an empty cache is marked causal instead of masked.
    """
    keys = query + context
    q = torch.empty(1, core.query_heads, query, core.qk_dim, device=device, dtype=dtype)
    k = torch.empty(1, core.kv_heads, keys, core.qk_dim, device=device, dtype=dtype)
    v = torch.empty(1, core.kv_heads, keys, core.v_dim, device=device, dtype=dtype)
    choice = torch._fused_sdp_choice(
        q, k, v, is_causal=query > 1 and context == 0, enable_gqa=core.query_heads != core.kv_heads
    )
    return _BACKENDS.get(int(choice), "math")
