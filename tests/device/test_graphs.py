"""Graphs and torch's profiler after an error that ends the CUDA context; other rules are in tests/simulated."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import recorded
import torch

from profiler.device.machine import recorded as profiled


@pytest.mark.parametrize("lost", [False, True])
def test_the_pool_of_a_graph_outlives_a_lost_device(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The destructor of a pool frees memory, and throws if the device is lost, which ends the process with a signal."""
    pool = SimpleNamespace(id=(0, 1))
    machine: Any = recorded.machine(monkeypatch)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: pool)
    before = sys.getrefcount(pool)
    replay = machine.capture(lambda: torch.ones(1))

    def synchronize(_device: Any = None) -> None:
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    del replay
    assert sys.getrefcount(pool) - before == (1 if lost else 0)


def test_an_error_in_its_exit_leaves_no_profiler_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit synchronises the device before it stops."""
    failing = Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(torch.profiler.profile, "stop", failing)
    with pytest.raises(RuntimeError, match="illegal memory access"), profiled(cuda=False):
        torch.ones(2) + 1
    assert not torch.autograd._profiler_enabled()
