"""Adapters that are not merged: modules that add a product of narrow matrices to a linear, by what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from profiler.measure.dense_twins import PackedLinear
from profiler.quant.storage import is_linear

# The rank of an adapter is at most this share of the smaller side of its linear.
_MOST_RANK = 0.5
# Pairs of inputs that show whether a module is linear.
_PAIRS = 32


def unmerged_adapters(model: nn.Module) -> list[tuple[PackedLinear, Any]]:
    """Each module that computes a linear and an adapter to it, and that linear alone, as a merged one would be.

    LoRA, DoRA and their kin are linear in their input, so each has one weight that computes the same.
    """
    return [(PackedLinear(parent, name, module), base) for parent, name, module, base in _adapted(model)]


def _adapted(parent: nn.Module) -> Iterator[tuple[nn.Module, str, Any, Any]]:
    for name, child in parent.named_children():
        base = _base_of(child)
        if base is not None and _is_linear_in_its_input(child, base.in_features):
            yield parent, name, child, base
        else:
            yield from _adapted(child)


def _base_of(module: Any) -> Any:
    """The linear in a module whose other matrices are narrow and lead from its inputs to its outputs, else None."""
    linears = [each for each in module.modules() if is_linear(each) and isinstance(each, nn.Linear)]
    if not linears:
        return None
    base = max(linears, key=lambda each: each.in_features * each.out_features)
    ins, outs = base.in_features, base.out_features
    factors = [tuple(each.shape) for each in module.parameters() if each.dim() == 2 and each is not base.weight]
    ranks = {min(shape) for shape in factors}
    is_narrow = bool(ranks) and max(ranks) <= _MOST_RANK * min(ins, outs)
    leads = {max(shape) for shape in factors} == {ins, outs}
    if not (is_narrow and leads and len(factors) > 1):
        return None
    if base is module:  # a linear with matrices of its own
        base = nn.Linear(ins, outs, bias=module.bias is not None, device="meta")
        base.weight, base.bias = module.weight, module.bias
    return base


def _is_linear_in_its_input(module: Any, ins: int) -> bool:
    """Whether f(a) + f(b) = f(a + b) + f(0), except for rounding.

    A single pair of inputs may have the same signs in a narrow layer, where a ReLU is linear, too.
    """
    weight = next(each for each in module.parameters() if each.is_floating_point())
    pairs = torch.randn(2, _PAIRS, ins, generator=torch.Generator().manual_seed(0))
    a, b = pairs.to(weight.device, weight.dtype)
    try:
        with torch.no_grad():
            both, zero = module(a + b), module(torch.zeros_like(a))
            error = (module(a) + module(b) - both - zero).abs().max()
            return bool(error <= 16 * torch.finfo(weight.dtype).eps * (1 + both.abs().max()) * ins**0.5)
    except Exception:  # a module with other inputs
        return False
