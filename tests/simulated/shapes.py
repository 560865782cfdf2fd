"""Output shapes of operators, from torch's `meta` device, without values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

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
        held = torch.empty(whole.nbytes(), dtype=torch.uint8, device=_META)
        storage = storages[whole._cdata] = held.untyped_storage()
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_card(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def in_place(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a call returns its first argument, which keeps its shape."""
    if not func._schema.is_mutable:
        return False
    name = func._schema.name.removeprefix("aten::")
    return name.endswith("_") and name not in _RESHAPING and bool(args) and isinstance(args[0], torch.Tensor)
