"""Output shapes of operators, from torch's `meta` device without values, and the bytes and FLOPs of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten

ALLOCATIONS = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.empty_permuted.default,
}  # fmt: skip
"""Operators that allocate memory and run no kernel."""

GATHERS = {aten.embedding.default: 0, aten.index.Tensor: 0, aten.index_select.default: 0, aten.gather.default: 0}
"""Operators, and the position of the argument of which they read only the bytes that they write."""

SCATTERS = {
    aten.index_copy_.default, aten.index_put_.default, aten.index_add_.default, aten.scatter_.src,
    aten.scatter_.value, aten.scatter_add_.default, aten.slice_scatter.default,
}  # fmt: skip
"""Operators that write only part of their output: the bytes that they are given."""


class Place(NamedTuple):
    number: int
    """The number of its tensor among the inputs and outputs of a call."""
    offset: int
    nbytes: int


class Price(NamedTuple):
    """The work of a call's kernel, which is the same for tensors of the same layout."""

    name: str
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    flops: float = 0.0
    dtype: str = ""
    workspace: bool = False


def price_of(
    func: Any,
    args: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    fresh: Sequence[int],
) -> Price | None:
    """Return the price of a call, or None if no kernel runs. `fresh` are the outputs with new memory."""
    if func in ALLOCATIONS or func is aten.detach_.default or not (fresh or func._schema.is_mutable):
        return None
    written = [at for at in range(len(outputs)) if at in fresh or not fresh]
    if not any(outputs[at].numel() for at in written):
        return None
    writes = [place(len(inputs) + at, outputs[at]) for at in written]
    reads = [place(at, tensor) for at, tensor in enumerate(inputs) if on_card(tensor) and tensor.numel()]
    if func in GATHERS:
        table = reads[GATHERS[func]]
        read = min(table.nbytes, sum(each.nbytes for each in writes))
        reads[GATHERS[func]] = table._replace(nbytes=read)
    elif func in SCATTERS:
        reads = reads[1:]
        given = max((each.nbytes for each in reads), default=0)
        writes = [each._replace(nbytes=min(each.nbytes, given)) for each in writes]
    elif str(func) == BY_EXPERTS:
        experts = args[1].shape[0]
        hit = 1 - (1 - 1 / experts) ** args[0].shape[0]  # the average share that independent choices reach
        reads[1] = reads[1]._replace(nbytes=int(reads[1].nbytes * hit))
    elif not inputs or func._schema.name.endswith(("fill_", "zero_", "normal_", "uniform_", "random_")):
        reads = []  # it writes without reading
    matmul = MATMULS.get(str(func))
    if matmul is None:
        return Price(str(func), tuple(reads), tuple(writes))
    flops, operand = matmul(args)
    dtype = matmul_dtype(operand)
    return Price(f"{func} {dtype}", tuple(reads), tuple(writes), flops, dtype, workspace=True)


def place(number: int, tensor: torch.Tensor) -> Place:
    return Place(number, tensor.storage_offset() * tensor.element_size(), nbytes(tensor))


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's storage; expanded dimensions count once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in pairs if stride or size == 0) * tensor.element_size()


def _matmul(args: Sequence[Any]) -> tuple[float, torch.Tensor]:
    return 2.0 * args[0].numel() * args[1].shape[-1], args[0]


def _sum_and_matmul(args: Sequence[Any]) -> tuple[float, torch.Tensor]:
    return _matmul(args[1:])


def _by_rows(args: Sequence[Any]) -> tuple[float, torch.Tensor]:
    """The weight is stored by rows: [outputs, inputs]."""
    return 2.0 * args[0].numel() * args[1].shape[0], args[0]


def _packed(args: Sequence[Any]) -> tuple[float, torch.Tensor]:
    """The weight has 4 bits, and its shape is another argument."""
    return 2.0 * args[0].numel() * args[2][0], args[0]


BY_EXPERTS = "aten._grouped_mm.default"
PACKED = "bitsandbytes.gemm_4bit.default"
BATCHED = "aten.bmm.default"
MATMULS: dict[str, Callable[[Sequence[Any]], tuple[float, torch.Tensor]]] = {
    "aten.mm.default": _matmul,
    BATCHED: _matmul,
    "aten.addmm.default": _sum_and_matmul,
    "aten.baddbmm.default": _sum_and_matmul,
    "aten._int_mm.default": _matmul,
    "aten._scaled_mm.default": _matmul,
    BY_EXPERTS: _matmul,
    "bitsandbytes.int8_linear_matmul.default": _by_rows,
    PACKED: _packed,
}
"""Each returns (FLOPs, the operand whose dtype decides the speed). By name, since some versions lack some of them."""


def matmul_dtype(operand: torch.Tensor) -> str:
    """Return the key of a matmul's speed in a card's truth."""
    if operand.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tfloat32"
    name = str(operand.dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


_META = torch.device("meta")

_RESHAPING = {"resize_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "swapdims_"}
"""Operators that change the shape of their argument."""


def shaped(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """Return an operator's output, and the stand-in of each input tensor at any nesting."""
    standing_in: list[torch.Tensor] = []
    storages: dict[int, torch.UntypedStorage] = {}

    def stand_in(value: Any) -> Any:
        if isinstance(value, torch.device):
            return _META
        if not isinstance(value, torch.Tensor):
            return value
        standing_in.append(_without_values(value, storages))
        return standing_in[-1]

    args, kwargs = tree_map(stand_in, (tuple(args), dict(kwargs)))
    return func(*args, **kwargs), standing_in


def _without_values(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Copy a tensor without values; copies share a storage if their originals do."""
    whole = tensor.untyped_storage()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
    storage = storages.get(whole._cdata)
    if storage is None:
        without_values = torch.empty(whole.nbytes(), dtype=torch.uint8, device=_META)
        storage = storages[whole._cdata] = without_values.untyped_storage()
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_card(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def in_place(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a call returns its first argument, which keeps its shape."""
    if not func._schema.is_mutable:
        return False
    name = func._schema.name.removeprefix("aten::")
    return name.endswith("_") and name not in _RESHAPING and bool(args) and isinstance(args[0], torch.Tensor)
