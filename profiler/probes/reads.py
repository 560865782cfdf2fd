"""How often the host waits for a value of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = frozenset(
    (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default, torch.ops.aten.is_nonzero.default)
)
"""What `.item()`, `bool(tensor)` and printing come to, in inference mode and without; a card's host waits for each."""


class _Counting(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.reads: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.reads += func in _READS
        return func(*args, **(kwargs or {}))


def count_reads(run: Callable[[], object]) -> int:
    """Reads of single values by the host while `run` runs."""
    counting = _Counting()
    with counting:
        run()
    return counting.reads
