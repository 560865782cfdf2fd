"""CUDA graphs without a card: captures that record aten operators, and their replays.

A CUDA graph consists of kernels with the addresses of their launch. A replay runs them again on the current content,
without the Python around them. A number from the host keeps its value of the capture, and a capture that waits for the
device is an error. Both hold here too, with aten operators instead of kernels.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.device.machine import CudaMachine


class RecordedGraph:
    """Operators with their arguments; a replay writes each result to the place of the first result."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def reset(self) -> None:
        self.calls.clear()

    def replay(self) -> None:
        for operator, args, kwargs, first in self.calls:
            for old, new in zip(_tensors(first), _tensors(operator(*args, **kwargs)), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def _tensors(output: Any) -> list[torch.Tensor]:
    outputs = output if isinstance(output, (tuple, list)) else [output]
    return [each for each in outputs if isinstance(each, torch.Tensor)]


class _Capture(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph, **_: Any) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        output = func(*args, **(kwargs or {}))
        self._graph.calls.append((func, args, kwargs or {}, output))
        return output


def machine(monkeypatch: pytest.MonkeyPatch) -> CudaMachine:
    """Return a CUDA machine whose tensors are on the CPU and whose graphs are `RecordedGraph`s."""
    replaced: dict[str, Any] = {
        "CUDAGraph": RecordedGraph, "graph": _Capture, "MemPool": lambda: SimpleNamespace(id=(0, 1)),
        "get_allocator_backend": lambda: "native", "memory_snapshot": list, "current_device": lambda: 0,
        "Stream": Mock(), "current_stream": Mock(), "is_current_stream_capturing": lambda: False,
        "stream": lambda _stream: contextlib.nullcontext(),
        **dict.fromkeys(("set_device", "set_stream", "synchronize"), lambda _=None: None),
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return CudaMachine(torch.device("cpu"))
