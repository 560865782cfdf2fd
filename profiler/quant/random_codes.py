"""Random integers as the codes of a quantised weight."""

from __future__ import annotations

import torch

INT8_CODES = torch.arange(-128, 128)
INT4_CODES = torch.arange(-8, 8) + 0.5
FLOAT8_CODES = torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn)


def fill_random(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` with random bytes. Drawing eight bytes at a time takes a sixth of the time."""
    data = tensor.view(-1).view(torch.uint8)
    data.zero_()  # all threads touch the new pages here; drawing uses one thread
    whole = len(data) // 8 * 8
    data[:whole].view(torch.int64).random_(-(2**63), None)
    data[whole:].random_(0, 256)
    return tensor


def rms(codes: torch.Tensor) -> float:
    """Return the root mean square of a format's codes, each equally likely."""
    return float(codes.float().square().mean().sqrt())
