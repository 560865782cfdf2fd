"""Which kernel `scaled_dot_product_attention` takes on a card, and what it costs.

After aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.13): flash from compute capability 8.0 on, in 16
bits, without a mask, at one head width of at most 256; memory-efficient without grouped heads, bfloat16 from 8.0 on;
else math.
"""

from __future__ import annotations

from typing import Any

import torch

MATH, FLASH, EFFICIENT = 0, 1, 2
_HALVES = (torch.float16, torch.bfloat16)
_FLASH_WIDTH = 256


def choice(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    grouped: bool,
) -> int:
    """The backend's number, as `torch._fused_sdp_choice` gives it."""
    dtype, width = query.dtype, query.shape[-1]
    eights = all(tensor.shape[-1] % 8 == 0 for tensor in (query, key, value))
    one_width = width == key.shape[-1] == value.shape[-1]
    if capability >= (8, 0) and dtype in _HALVES and mask is None and one_width and width <= _FLASH_WIDTH and eights:
        return FLASH
    heads_equal = query.shape[1] == key.shape[1]
    known = dtype in (torch.float16, torch.float32) or (dtype is torch.bfloat16 and capability >= (8, 0))
    if known and not (grouped and not heads_equal) and eights:
        return EFFICIENT
    return MATH


def flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> float:
    """FLOPs of a fused kernel: half of the square where it skips what the causal flag hides."""
    batch, heads, new, width = query.shape
    held = key.shape[2]
    pairs = new * (new + 1) / 2 if causal and new == held else new * held
    return float(2 * batch * heads * pairs * (width + value.shape[-1]))


def output(query: torch.Tensor, value: torch.Tensor) -> Any:
    """Laid out as what a fused kernel writes: [batch, heads, new, width], the heads of a token side by side."""
    batch, heads, new, _ = query.shape
    shape = (batch, new, heads, value.shape[-1])
    return torch.empty(shape, dtype=query.dtype, device="meta").transpose(1, 2)
