"""What each operator of aten moves and computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
}
"""These take memory and run nothing."""

GATHERS = {aten.embedding.default: 0, aten.index.Tensor: 0, aten.index_select.default: 0, aten.gather.default: 0}
"""Of this argument they read no more than they write."""

SCATTERS = {
    aten.index_copy_.default,
    aten.index_put_.default,
    aten.index_add_.default,
    aten.scatter_.src,
    aten.scatter_.value,
    aten.scatter_add_.default,
    aten.slice_scatter.default,
}
"""Of what they change they write no more than they are given."""


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor; what an expansion repeats lies there once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in pairs if stride or size == 0) * tensor.element_size()


def _product(left: torch.Tensor, right: torch.Tensor) -> float:
    return 2.0 * left.numel() * right.shape[-1]


PRODUCTS: dict[Any, Callable[[Sequence[Any]], tuple[float, torch.Tensor]]] = {
    aten.mm.default: lambda args: (_product(args[0], args[1]), args[0]),
    aten.bmm.default: lambda args: (_product(args[0], args[1]), args[0]),
    aten.addmm.default: lambda args: (_product(args[1], args[2]), args[1]),
    aten.baddbmm.default: lambda args: (_product(args[1], args[2]), args[1]),
    aten._int_mm.default: lambda args: (_product(args[0], args[1]), args[0]),
    aten._scaled_mm.default: lambda args: (_product(args[0], args[1]), args[0]),
    aten._grouped_mm.default: lambda args: (_product(args[0], args[1]), args[0]),
}
"""(FLOPs, an operand, whose dtype decides the speed)."""


def _by_rows(args: Sequence[Any]) -> tuple[float, torch.Tensor]:
    """Of a weight that lies row by row: [outputs, inputs]."""
    return 2.0 * args[0].numel() * args[1].shape[0], args[0]


def _packed(args: Sequence[Any]) -> tuple[float, torch.Tensor]:
    """Of a weight in 4 bits, whose shape is handed over beside it."""
    return 2.0 * args[0].numel() * args[2][0], args[0]


NAMED_PRODUCTS = {"bitsandbytes::int8_linear_matmul": _by_rows, "bitsandbytes::gemm_4bit": _packed}
"""The same for operators of libraries that nobody may have imported, by their names."""


def product_dtype(operand: torch.Tensor) -> str:
    """The name of a product's speed in a card's truth."""
    if operand.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tfloat32"
    name = str(operand.dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


def experts_hit(experts: int, routed: int) -> float:
    """Experts that so many independent choices reach, on average, as a share of all."""
    return 1 - (1 - 1 / experts) ** routed
