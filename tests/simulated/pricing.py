"""Bytes and FLOPs of each aten operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .shapes import on_card

aten = torch.ops.aten

ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
}
"""Operators that allocate memory and run no kernel."""

GATHERS = {aten.embedding.default: 0, aten.index.Tensor: 0, aten.index_select.default: 0, aten.gather.default: 0}
"""Operators, and the position of the argument of which they read only the bytes that they write."""

SCATTERS = {
    aten.index_copy_.default,
    aten.index_put_.default,
    aten.index_add_.default,
    aten.scatter_.src,
    aten.scatter_.value,
    aten.scatter_add_.default,
    aten.slice_scatter.default,
}
"""Operators that write only part of their output: the bytes that they are given."""


class Place(NamedTuple):
    """A region of memory, relative to its tensor."""

    number: int
    """The number of its tensor among the inputs and outputs of a call."""
    offset: int
    """Offset in bytes from the beginning of the tensor's storage."""
    nbytes: int


class Price(NamedTuple):
    """The work of a call's kernel, which is the same for tensors of the same layout."""

    name: str
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    flops: float = 0.0
    dtype: str = ""
    """The dtype of a product's operands."""
    workspace: bool = False
    """Whether cuBLAS runs it."""


@dataclass(frozen=True, slots=True)
class Operator:
    """The facts of an operator that its price needs."""

    name: str
    mutates: bool
    runs: bool
    """Whether it is more than an allocation."""
    product: Callable[[Sequence[Any]], tuple[float, torch.Tensor]] | None
    gathered: int | None
    scatters: bool
    by_experts: bool
    blind: bool
    """Whether it writes without reading."""

    @classmethod
    def of(cls, func: Any) -> Operator:
        return cls(
            name=str(func),
            mutates=func._schema.is_mutable,
            runs=func not in ALLOCATIONS and func is not aten.detach_.default,
            product=PRODUCTS.get(func) or NAMED_PRODUCTS.get(func.name()),
            gathered=GATHERS.get(func),
            scatters=func in SCATTERS,
            by_experts=func.name() == BY_EXPERTS,
            blind=func._schema.name.endswith(("fill_", "zero_", "normal_", "uniform_", "random_")),
        )

    def price(
        self, args: Sequence[Any], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], fresh: Sequence[int]
    ) -> Price | None:
        """Return the price of a call, or None if no kernel runs. `fresh` are the outputs with new memory."""
        if not self.runs or not (fresh or self.mutates):
            return None
        written = [at for at in range(len(outputs)) if at in fresh or not fresh]
        if not any(outputs[at].numel() for at in written):
            return None
        writes = [place(len(inputs) + at, outputs[at]) for at in written]
        reads = [place(at, tensor) for at, tensor in enumerate(inputs) if on_card(tensor) and tensor.numel()]
        if self.gathered is not None:
            table = reads[self.gathered]
            reads[self.gathered] = table._replace(nbytes=min(table.nbytes, sum(each.nbytes for each in writes)))
        elif self.scatters:
            reads = reads[1:]
            given = max((each.nbytes for each in reads), default=0)
            writes = [each._replace(nbytes=min(each.nbytes, given)) for each in writes]
        elif self.by_experts:
            experts = args[1].shape[0]
            hit = int(reads[1].nbytes * experts_hit(experts, args[0].shape[0]))
            reads[1] = reads[1]._replace(nbytes=hit)
        elif self.blind or not inputs:
            reads = []
        if self.product is None:
            return Price(self.name, tuple(reads), tuple(writes))
        flops, operand = self.product(args)
        dtype = product_dtype(operand)
        return Price(f"{self.name} {dtype}", tuple(reads), tuple(writes), flops, dtype, workspace=True)


def place(number: int, tensor: torch.Tensor) -> Place:
    """Return the place of a tensor with this number."""
    return Place(number, tensor.storage_offset() * tensor.element_size(), nbytes(tensor))


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's storage; expanded dimensions count once."""
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
}
"""Each returns (FLOPs, the operand whose dtype decides the speed)."""


def _by_rows(args: Sequence[Any]) -> tuple[float, torch.Tensor]:
    """Return FLOPs and operand for a weight stored by rows: [outputs, inputs]."""
    return 2.0 * args[0].numel() * args[1].shape[0], args[0]


def _packed(args: Sequence[Any]) -> tuple[float, torch.Tensor]:
    """Return FLOPs and operand for a 4-bit weight, whose shape is another argument."""
    return 2.0 * args[0].numel() * args[2][0], args[0]


BY_EXPERTS = "aten::_grouped_mm"
NAMED_PRODUCTS = {
    "bitsandbytes::int8_linear_matmul": _by_rows,
    "bitsandbytes::gemm_4bit": _packed,
    BY_EXPERTS: lambda args: (_product(args[0], args[1]), args[0]),
}
"""The same by name, for operators that some versions lack: torch 2.7 has no grouped product."""


def product_dtype(operand: torch.Tensor) -> str:
    """Return the key of a product's speed in a card's truth."""
    if operand.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tfloat32"
    name = str(operand.dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


def experts_hit(experts: int, routed: int) -> float:
    """Return the average share of experts that independent choices reach."""
    return 1 - (1 - 1 / experts) ** routed
