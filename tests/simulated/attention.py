"""The kernel that `scaled_dot_product_attention` selects on a card, and its cost.

The order is that of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.13). cuDNN: compute capability 9.x
and 10.x, 16 bits, heads of up to 128 (wheels of torch 2.11 and later have the cuDNN that this needs). Flash: from 8.0
on, 16 bits, no mask, one head width of at most 256. Memory-efficient: no grouped heads, bfloat16 from 8.0 on. Otherwise
math. Kernels that are switched off (`sdpa_kernel`, `enable_flash_sdp`) are not selected.
"""

from collections.abc import Hashable
from typing import Any

import torch

MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3
NAMES = {FLASH: "flash attention", EFFICIENT: "memory-efficient attention", CUDNN: "cudnn attention"}
_HALVES = (torch.float16, torch.bfloat16)
_FLASH_WIDTH = 256
_CUDNN_WIDTH = 128


def choice(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    grouped: bool,
) -> int:
    """Return the backend's number, as `torch._fused_sdp_choice` does. Raises RuntimeError if all that work are off."""
    enabled = torch.backends.cuda
    dtype, width = query.dtype, query.shape[-1]
    eights = all(tensor.shape[-1] % 8 == 0 for tensor in (query, key, value))
    narrow = max(key.shape[-1], value.shape[-1]) <= _CUDNN_WIDTH
    may_run = enabled.cudnn_sdp_enabled() and key.shape[-2] != 1
    if capability[0] in (9, 10) and dtype in _HALVES and eights and narrow and may_run:
        return CUDNN
    one_width = width == key.shape[-1] == value.shape[-1]
    takes_flash = capability >= (8, 0) and dtype in _HALVES and mask is None and eights
    if enabled.flash_sdp_enabled() and takes_flash and one_width and width <= _FLASH_WIDTH:
        return FLASH
    heads_equal = query.shape[1] == key.shape[1]
    known = dtype in (torch.float16, torch.float32) or (dtype is torch.bfloat16 and capability >= (8, 0))
    if enabled.mem_efficient_sdp_enabled() and known and not (grouped and not heads_equal) and eights:
        return EFFICIENT
    if not enabled.math_sdp_enabled():
        raise RuntimeError("No available kernel. Aborting execution.")
    return MATH


def plan(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> Hashable:
    """Return the key of a cuDNN plan on one card (aten/src/ATen/native/cudnn/MHA.cpp, `MHAParams`)."""
    operands = (query, key, value, *([] if mask is None else [mask]))
    return causal, query.dtype, query.device, *((tuple(each.shape), each.stride()) for each in operands)


def flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> float:
    """Return the FLOPs of a fused kernel: half of the square if the causal flag lets it skip the rest."""
    batch, heads, new, width = query.shape
    length = key.shape[2]
    pairs = new * (new + 1) / 2 if causal and new == length else new * length
    return float(2 * batch * heads * pairs * (width + value.shape[-1]))


def output(query: torch.Tensor, value: torch.Tensor) -> Any:
    """Return the output in a fused kernel's layout: [batch, heads, new, width], the heads of a token adjacent."""
    batch, heads, new, _ = query.shape
    shape = (batch, new, heads, value.shape[-1])
    return torch.empty(shape, dtype=query.dtype, device="meta").transpose(1, 2)
