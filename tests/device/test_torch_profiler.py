"""torch's profiler is off after any error."""

from __future__ import annotations

import pytest
import torch

from profiler.device.machine import recorded


def failing(*_: object) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_an_error_in_its_exit_leaves_no_profiler_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit synchronises the device before it stops."""
    monkeypatch.setattr(torch.profiler.profile, "stop", failing)
    with pytest.raises(RuntimeError, match="illegal memory access"), recorded(cuda=False):
        torch.ones(2) + 1
    assert not torch.autograd._profiler_enabled()
