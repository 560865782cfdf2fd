"""Dense linears of random values in place of a model's packed ones."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler.quant.storage import is_linear, stored

_MOST_BYTES = 2 << 30
"""Bytes of dense weights at most. Layers share weights beyond that, and no cache of a CPU or GPU holds so many."""
_SPREAD = 0.02
"""Standard deviation of their random values, small enough that no activation overflows."""


@dataclass(frozen=True)
class PackedLinear:
    """A linear of packed weights, and its place in a model."""

    parent: nn.Module
    name: str
    module: Any

    @property
    def shape(self) -> tuple[int, int, bool]:
        """(inputs, outputs, whether it has a bias)."""
        return self.module.in_features, self.module.out_features, getattr(self.module, "bias", None) is not None

    @property
    def format(self) -> str:
        """The format as `stored` names it, or the module's class."""
        try:
            name = stored(self.module).format
        except (ValueError, AttributeError):
            name = "packed"
        return type(self.module).__name__ if name == "packed" else name


def packed_linears(model: nn.Module) -> list[PackedLinear]:
    """The linears of a model whose weights are not a plain matrix of floats of 16 or more bits."""
    return [
        PackedLinear(parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_linear(child) and type(child).__name__ != "Conv1D" and not _is_dense(child)
    ]


def _is_dense(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if weight is None or type(weight) not in (torch.Tensor, nn.Parameter):
        return False
    wide = weight.is_floating_point() and weight.itemsize > 1
    return bool(wide and tuple(weight.shape) == (module.out_features, module.in_features))


def dense_copies(linears: Sequence[PackedLinear], dtype: torch.dtype, room_bytes: float) -> list[nn.Linear]:
    """A dense linear of random weights for each packed one; if `room_bytes` is short, those of a shape take turns."""
    whole_bytes = sum(ins * outs for ins, outs, _ in (each.shape for each in linears)) * dtype.itemsize
    share = min(1.0, min(room_bytes, _MOST_BYTES) / max(1, whole_bytes))
    made: dict[tuple[int, int, bool], list[nn.Linear]] = {}
    copies = []
    for number, each in enumerate(linears):
        of_shape = made.setdefault(each.shape, [])
        count = sum(other.shape == each.shape for other in linears)
        if len(of_shape) < math.ceil(share * count):
            tensors = (*each.module.parameters(recurse=False), *each.module.buffers(recurse=False))
            device = tensors[0].device if tensors else torch.device("cpu")
            ins, outs, bias = each.shape
            linear = nn.Linear(ins, outs, bias=bias, dtype=dtype, device="meta").to_empty(device=device)
            with torch.no_grad():
                for parameter in linear.parameters():
                    parameter.normal_(std=_SPREAD)
            of_shape.append(linear.requires_grad_(False))
            copies.append(of_shape[-1])
        else:
            copies.append(of_shape[number % len(of_shape)])
    return copies


@contextlib.contextmanager
def replaced(linears: Sequence[PackedLinear], copies: Sequence[nn.Linear]) -> Iterator[None]:
    """Context manager in which a model computes with `copies` in place of its packed linears."""
    try:
        for each, copy in zip(linears, copies, strict=True):
            setattr(each.parent, each.name, copy)
        yield
    finally:
        for each in linears:
            setattr(each.parent, each.name, each.module)
