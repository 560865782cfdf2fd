"""Ask torch which attention kernel it chooses for given shapes and dtypes, and transformers how it calls it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast, get_args

import torch
from torch import nn

from profiler.counting.attention import AttentionCore
from profiler.counting.operators import ModelWork
from profiler.counting.walk import linear_modules
from profiler.facts.step import UNFUSED_KERNEL, Attention, ExecutionPath, Heads
from profiler.patching import patched

_BACKENDS = {0: UNFUSED_KERNEL, 1: "flash", 2: "memory-efficient", 3: "cudnn", 4: "overrideable"}


@dataclass(frozen=True)
class SdpaStep:
    """A step of one sequence, `query` new tokens that see `keys`, about which torch and transformers are asked."""

    device: torch.device
    dtype: torch.dtype
    query: int
    keys: int
    compiled: bool = False


def attention_path(attention: str, cores: Sequence[AttentionCore], step: SdpaStep) -> ExecutionPath:
    """Return how the libraries execute a step with this attention; if one layer uses the math kernel, all count so."""
    if attention not in get_args(Attention):
        return ExecutionPath()
    path = ExecutionPath(attention=cast("Attention", attention))
    if attention != "sdpa" or not cores:
        return path

    def kernel(masked: bool) -> str:
        kernels = {sdpa_kernel(core, step, masked=masked) for core in cores}
        return UNFUSED_KERNEL if UNFUSED_KERNEL in kernels else "+".join(sorted(kernels))

    def heads(masked: bool) -> dict[int, Heads]:
        grouped = (core for core in cores if core.query_heads > core.kv_heads)
        return {core.qk_dim: handed(core, step, masked=masked).heads for core in grouped}

    return replace(path, kernel=kernel(False), masked_kernel=kernel(True), heads=heads(False), masked_heads=heads(True))


def path_here(
    module: nn.Module, work: ModelWork, device: torch.device, dtype: torch.dtype, query: int
) -> ExecutionPath:
    """Return how a prefill of `query` tokens of a model on meta will run on a device of this machine."""
    attention = getattr(module.config.get_text_config(), "_attn_implementation", None) or "sdpa"
    return attention_path(attention, work.of_kind(AttentionCore), SdpaStep(device, dtype, query, query))


# The operands of a query are really allocated. Longer sequences do not change the choice of a kernel; neither do wider
# heads, except by the divisibility of their width.
_MOST_TOKENS = 1 << 16
_MOST_WIDTH = 1 << 10


@dataclass(frozen=True)
class SdpaCall:
    """The call of `scaled_dot_product_attention` that transformers makes in a step."""

    heads: Heads
    query_heads: int
    kv_heads: int
    rows: int
    """Rows per query head."""
    is_causal: bool
    enable_gqa: bool


def handed(core: AttentionCore, step: SdpaStep, *, masked: bool) -> SdpaCall:
    """Return the arguments that transformers passes to `sdpa` for one new token, or for two if the step has several.

    It replaces `scaled_dot_product_attention` in a call: the versions differ (`pack_gqa` came after 5.17, and no
    compiled step uses it). Raises whatever transformers raises.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, groups = min(step.query, 2), core.query_heads // core.kv_heads
    q, k, v = _operands(core, step, core.query_heads, core.kv_heads, rows, keys=2)
    mask = torch.ones(1, 1, rows, 2, device=step.device, dtype=torch.bool) if masked else None
    calls: list[SdpaCall] = []

    def record(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        heads: Heads = "repeated" if key.shape[1] == core.query_heads else "grouped"
        if query.shape[1] != core.query_heads:
            heads = "packed"
        causal, grouped = bool(options.get("is_causal")), bool(options.get("enable_gqa"))
        calls.append(SdpaCall(heads, query.shape[1], key.shape[1], query.shape[2], causal, grouped))
        return query.new_empty(*query.shape[:-1], value.shape[-1])

    module: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    with (
        patched(torch.nn.functional, scaled_dot_product_attention=record),
        patched(torch.compiler, is_compiling=lambda: step.compiled),
    ):
        sdpa_attention_forward(module, q, k, v, mask)
    return calls[0]


def _operands(
    core: AttentionCore, step: SdpaStep, heads: int, kv_heads: int, rows: int, keys: int
) -> tuple[torch.Tensor, ...]:
    """Return Q, K and V of one sequence, [1, heads, tokens, width] each, with at most about `_MOST_WIDTH` columns."""
    qk_dim, v_dim = (dim if dim <= _MOST_WIDTH else _MOST_WIDTH + dim % 64 for dim in (core.qk_dim, core.v_dim))
    shapes = ((1, heads, rows, qk_dim), (1, kv_heads, keys, qk_dim), (1, kv_heads, keys, v_dim))
    return tuple(torch.empty(shape, device=step.device, dtype=step.dtype) for shape in shapes)


def sdpa_kernel(core: AttentionCore, step: SdpaStep, *, masked: bool) -> str:
    """Return torch's choice of a kernel for one sequence, not run: flash, memory-efficient, cudnn or math."""
    call, keys = handed(core, step, masked=masked), min(step.keys, _MOST_TOKENS)
    rows = min(step.query, _MOST_TOKENS) if step.query > 1 else call.rows
    q, k, v = _operands(core, step, call.query_heads, call.kv_heads, rows, keys)
    mask = torch.empty(1, 1, 1, keys, device=step.device, dtype=torch.bool).expand(1, 1, rows, keys) if masked else None
    choice = torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=call.is_causal, enable_gqa=call.enable_gqa)
    return _BACKENDS.get(int(choice), UNFUSED_KERNEL)


def outlier_columns(model: Any) -> dict[str, float]:
    """Return the mean columns per layer with a value of 6 or more in LLM.int8()'s last step, by linear operator."""
    means: dict[str, float] = {}
    for (name, _ins, _outs), modules in linear_modules(model).items():
        columns = [getattr(getattr(module, "state", None), "idx", None) for module in modules]
        counts = [index.numel() for index in columns if isinstance(index, torch.Tensor)]
        if any(counts):
            means[name] = sum(counts) / len(modules)
    return means
