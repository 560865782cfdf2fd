"""CUDA graphs: their workspaces, and their end after an error that ends the CUDA context."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import recorded
import torch

from profiler.errors import CaptureError


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: found.append("clear"), raising=False)
    return found


def test_a_graph_has_cublas_workspaces_of_its_own(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with the workspace of an earlier graph's pool would write to freed memory after that graph is freed.

    Eager code must not use this graph's workspace either (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """
    recorded.machine(monkeypatch).capture(lambda: events.append("work"))
    assert events == ["clear", "work", "clear"]


def test_a_failed_capture_leaves_no_workspace(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = recorded.machine(monkeypatch)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None, raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: SimpleNamespace(id=(0, 1), use_count=lambda: 1))
    with pytest.raises(CaptureError, match="stream is capturing"):
        machine.capture(lambda: torch.ones(1).item())
    assert events == ["clear", "clear"]


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
