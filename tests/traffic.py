"""The bytes that torch's operators move."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default


class Traffic(TorchDispatchMode):
    """Counts the bytes that each operator reads (every tensor once) and writes; views move nothing. Records names."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.names.append(func.__name__)
        if func is _SAFE_SOFTMAX:  # a composite that torch does not decompose for a mode
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        out = func(*args, **kwargs)
        # The first argument of `copy_` is only written.
        inputs = tree_leaves((args[1:] if func.__name__ == "copy_.default" else args, kwargs))
        read = {(t.data_ptr(), t.shape): t for t in inputs if isinstance(t, torch.Tensor)}
        written = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        storages = {t.untyped_storage().data_ptr() for t in read.values()}
        is_view = not func._schema.is_mutable and all(t.untyped_storage().data_ptr() in storages for t in written)
        if not is_view and "empty" not in func.__name__:
            self.bytes += sum(map(_distinct_bytes, [*read.values(), *written]))
        return out


def _distinct_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; expanded dimensions count once."""
    count = tensor.itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count
