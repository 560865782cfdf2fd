"""bitsandbytes' own table of the 4-bit kernels that a card runs, applied to simulated cards."""

import functools
import importlib
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from profiler.quant.bitsandbytes import _four_bit_table, four_bit_rows

NAME = "bitsandbytes.backends.cuda.ops"


@functools.cache
def table() -> Any:
    """Return the library's CUDA module, or None. It needs a function of torch that a build without CUDA lacks."""
    known = NAME in sys.modules
    with mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True):
        try:
            found = importlib.import_module(NAME)
        except ImportError:
            return None
    if not known:  # without simulated cards, an import of the module must fail again
        package, _, name = NAME.rpartition(".")
        del sys.modules[NAME]
        delattr(sys.modules[package], name)
    return found if hasattr(found, "_gemm_4bit_use_custom_fn") else None


def forget() -> None:
    """Forget what the library answered for other cards."""
    for each in (table()._gpu_dispatch_props, table()._gemm_4bit_use_custom_fn, _four_bit_table, four_bit_rows):
        each.cache_clear()


def fuses(values: torch.Tensor, shape: Sequence[int], blocksize: int) -> bool:
    """Return whether a matmul with a weight of this shape [outputs, inputs] unpacks it in the kernel
    (backends/cuda/ops.py)."""
    found = table()
    rows = values.numel() // values.shape[-1]
    if rows > found._gemm_4bit_custom_max_m or values.shape[-1] % blocksize:
        return False
    return bool(found._gemm_4bit_use_custom_fn(values.device.index, values.dtype, rows, *shape))
