"""Which attention kernel torch picks, asked of torch for the very shapes and dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast, get_args

import torch

from profiler.counting.attention import AttentionCore
from profiler.counting.walk import linear_modules
from profiler.facts.step import UNFUSED_KERNEL, Attention, ExecutionPath, Heads

_BACKENDS = {0: UNFUSED_KERNEL, 1: "flash", 2: "memory-efficient", 3: "cudnn", 4: "overrideable"}


def attention_path(
    attention: str,
    cores: Sequence[AttentionCore],
    device: torch.device,
    dtype: torch.dtype,
    *,
    query: int,
    keys: int,
    compiled: bool = False,
) -> ExecutionPath:
    """How transformers' attention interface of this name executes a step on this device: the libraries are asked.

    `query` new tokens a sequence see `keys`; one layer that falls back to the math path counts for all. `compiled`:
    the step is one of torch.compile's.
    """
    if attention not in get_args(Attention):
        return ExecutionPath()
    path = ExecutionPath(attention=cast("Attention", attention))
    if attention != "sdpa" or not cores:
        return path

    def pick(masked: bool) -> str:
        found = {
            sdpa_kernel(core, device, dtype, query=query, keys=keys, masked=masked, compiled=compiled) for core in cores
        }
        return UNFUSED_KERNEL if UNFUSED_KERNEL in found else "+".join(sorted(found))

    def heads(masked: bool) -> dict[int, Heads]:
        grouped = [core for core in cores if core.query_heads > core.kv_heads]
        return {
            core.qk_dim: handed(core, device, dtype, several=query > 1, masked=masked, compiled=compiled).heads
            for core in grouped
        }

    return replace(path, kernel=pick(False), masked_kernel=pick(True), heads=heads(False), masked_heads=heads(True))


# What is asked about is really allocated, and no kernel is chosen by a length beyond this, nor by how much wider than
# this a head is, but for whether its width is a multiple.
_LONGEST_ASKED = 1 << 16
_WIDEST_ASKED = 1 << 10


@dataclass(frozen=True)
class Handed:
    """The call of `scaled_dot_product_attention` that transformers makes of one step."""

    heads: Heads
    query_heads: int
    kv_heads: int
    rows: int
    """Of a query head."""
    is_causal: bool
    enable_gqa: bool


class _CallSeenError(Exception):
    """The call was seen, and is not made."""


def handed(
    core: AttentionCore, device: torch.device, dtype: torch.dtype, *, several: bool, masked: bool, compiled: bool
) -> Handed:
    """What transformers hands the kernel of `sdpa` for one new token a sequence, or for `several`.

    transformers' own `sdpa_attention_forward` is called on a few tokens of the core's heads, with
    `scaled_dot_product_attention` taken out. What it does depends on its version: `pack_gqa` came after 5.17, and is
    not for `compiled` steps. Raises whatever it raises.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, groups = (2 if several else 1), core.query_heads // core.kv_heads
    q, k, v = _operands(core, device, dtype, core.query_heads, core.kv_heads, rows, keys=2)
    mask = torch.ones(1, 1, rows, 2, device=device, dtype=torch.bool) if masked else None
    seen: list[Handed] = []

    def see(query: torch.Tensor, key: torch.Tensor, _value: torch.Tensor, **options: Any) -> None:
        heads: Heads = "repeated" if key.shape[1] == core.query_heads else "grouped"
        if query.shape[1] != core.query_heads:
            heads = "packed"
        causal, grouped = bool(options.get("is_causal")), bool(options.get("enable_gqa"))
        seen.append(Handed(heads, query.shape[1], key.shape[1], query.shape[2], causal, grouped))
        raise _CallSeenError

    module: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    with (
        _replaced(torch.nn.functional, "scaled_dot_product_attention", see),
        _replaced(torch.compiler, "is_compiling", lambda: compiled),
        suppress(_CallSeenError),
    ):
        sdpa_attention_forward(module, q, k, v, mask)
    return seen[0]


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within, `owner` has `value` under this name."""
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def _operands(
    core: AttentionCore, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, rows: int, keys: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V of one sequence, [1, heads, tokens, width] each, as wide as anything asks about."""
    qk_dim, v_dim = (dim if dim <= _WIDEST_ASKED else _WIDEST_ASKED + dim % 64 for dim in (core.qk_dim, core.v_dim))
    return (
        torch.empty(1, heads, rows, qk_dim, device=device, dtype=dtype),
        torch.empty(1, kv_heads, keys, qk_dim, device=device, dtype=dtype),
        torch.empty(1, kv_heads, keys, v_dim, device=device, dtype=dtype),
    )


def sdpa_kernel(
    core: AttentionCore,
    device: torch.device,
    dtype: torch.dtype,
    *,
    query: int,
    keys: int,
    masked: bool,
    compiled: bool = False,
) -> str:
    """The kernel behind `scaled_dot_product_attention` for one sequence: flash, memory-efficient, cudnn or math.

    Asks `torch._fused_sdp_choice`, which is what the call itself consults, about the call that transformers makes;
    nothing is computed.
    """
    query, keys = min(query, _LONGEST_ASKED), min(keys, _LONGEST_ASKED)
    call = handed(core, device, dtype, several=query > 1, masked=masked, compiled=compiled)
    rows = query if query > 1 else call.rows
    q, k, v = _operands(core, device, dtype, call.query_heads, call.kv_heads, rows, keys)
    mask = torch.empty(1, 1, 1, keys, device=device, dtype=torch.bool).expand(1, 1, rows, keys) if masked else None
    choice = torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=call.is_causal, enable_gqa=call.enable_gqa)
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
