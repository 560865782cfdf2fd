"""What each operator of aten moves and computes."""

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


class Place(NamedTuple):
    """A region by whose it is, wherever that lies."""

    number: int
    """Of a tensor among those that a call is given and gives."""
    offset: int
    """Bytes from where its storage begins."""
    nbytes: int


class Price(NamedTuple):
    """What the kernel of a call does; calls with tensors laid out alike have the same."""

    name: str
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    flops: float = 0.0
    dtype: str = ""
    """Of a product's operands."""
    workspace: bool = False
    """Whether cuBLAS runs it."""


@dataclass(frozen=True, slots=True)
class Operator:
    """What its price takes to know of an operator."""

    name: str
    mutates: bool
    runs: bool
    """Not a mere allocation."""
    product: Callable[[Sequence[Any]], tuple[float, torch.Tensor]] | None
    gathered: int | None
    scatters: bool
    by_experts: bool
    blind: bool
    """It writes without reading."""

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
        self,
        args: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        fresh: Sequence[int],
    ) -> Price | None:
        """Of a call with these tensors, of whose outputs these have `fresh` memory; None where no kernel runs."""
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
    """Where the tensor with this number lies in its storage."""
    return Place(number, tensor.storage_offset() * tensor.element_size(), nbytes(tensor))


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
}
"""(FLOPs, an operand, whose dtype decides the speed)."""


def _by_rows(args: Sequence[Any]) -> tuple[float, torch.Tensor]:
    """Of a weight that lies row by row: [outputs, inputs]."""
    return 2.0 * args[0].numel() * args[1].shape[0], args[0]


def _packed(args: Sequence[Any]) -> tuple[float, torch.Tensor]:
    """Of a weight in 4 bits, whose shape is handed over beside it."""
    return 2.0 * args[0].numel() * args[2][0], args[0]


BY_EXPERTS = "aten::_grouped_mm"
NAMED_PRODUCTS = {
    "bitsandbytes::int8_linear_matmul": _by_rows,
    "bitsandbytes::gemm_4bit": _packed,
    BY_EXPERTS: lambda args: (_product(args[0], args[1]), args[0]),
}
"""The same by name for operators that need not be there: torch 2.7 has no grouped product."""


def product_dtype(operand: torch.Tensor) -> str:
    """The name of a product's speed in a card's truth."""
    if operand.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tfloat32"
    name = str(operand.dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


def experts_hit(experts: int, routed: int) -> float:
    """Experts that so many independent choices reach, on average, as a share of all."""
    return 1 - (1 - 1 / experts) ** routed
