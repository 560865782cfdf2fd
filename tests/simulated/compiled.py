"""torch.compile on a simulated card: the same kernels after a compilation, optionally as a graph."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from .host import Host

COMPILATION_S = 20.0
"""Seconds to compile a step of about twenty layers on a machine with a few cores, with an empty inductor cache."""
RECORDING_S = 0.5
Arguments = list[tuple[int | str, Any]]
_REGION = "Torch-Compiled Region: 0/0"


@dataclass
class _Shape:
    calls: int = 0
    graph: Any = None
    inputs: Arguments = field(default_factory=list)
    output: Any = None


class Compiled:
    """A decode step with any arguments; if `captured`, its third and later calls replay a CUDA graph.

    It compiles again for tensors of other shapes and for a cache of another size. The second code of a kind has
    symbolic sizes and serves all later ones, unless `dynamic` is false; sizes of 1 are a kind of their own. The graph's
    key also contains the cache's address and its numbers on the host. If only these change, the graph is recorded
    again, as in torch's cudagraph trees.
    """

    def __init__(self, host: Host, function: Any, *, mode: Any = None, dynamic: Any = None, **_: Any) -> None:
        self._host = host
        self._function = function
        self._captured = mode == "reduce-overhead"
        self._shapes: dict[Any, _Shape] = {}
        self._most = math.inf if dynamic is False else 2
        self._compiled: dict[Any, set[Any]] = {}

    def __call__(self, *args: Any, **named: Any) -> Any:
        with torch.profiler.record_function(_REGION):
            return self._run([*enumerate(args), *named.items()])

    def _run(self, arguments: Arguments) -> Any:
        compiled = tuple((name, *_shape(value)) for name, value in arguments)
        kind = tuple(tuple(size if isinstance(size, str) else size == 1 for size in shape) for shape in compiled)
        codes = self._compiled.setdefault(kind, set())
        if compiled not in codes and len(codes) < self._most:
            codes.add(compiled)
            self._host.advance(COMPILATION_S)
        if not self._captured:
            return self._call(arguments)
        shape = self._shapes.setdefault((compiled, *(_place(value) for _, value in arguments)), _Shape())
        shape.calls += 1
        if shape.calls < 3:
            return self._call(arguments)
        if shape.graph is None:
            self._host.advance(RECORDING_S)
            shape.inputs = [
                (name, value.clone() if isinstance(value, torch.Tensor) else value) for name, value in arguments
            ]
            graph = torch.cuda.CUDAGraph()
            # The workspace is then in the graph's own pool (torch/_inductor/cudagraph_trees.py, clear_cublas_manager).
            torch._C._cuda_clearCublasWorkspaces()
            try:
                with torch.cuda.graph(graph):
                    shape.output = self._call(shape.inputs)
            finally:
                torch._C._cuda_clearCublasWorkspaces()
            shape.graph = graph  # A failed capture leaves no graph, so the next call captures again.
        for (_, memory), (_, value) in zip(shape.inputs, arguments, strict=True):
            if isinstance(value, torch.Tensor):
                memory.copy_(value)
        shape.graph.replay()
        return shape.output

    def _call(self, arguments: Arguments) -> Any:
        args = [value for name, value in arguments if isinstance(name, int)]
        return self._function(*args, **{name: value for name, value in arguments if isinstance(name, str)})


def _shape(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    layers = getattr(value, "layers", ())
    return tuple((type(layer).__name__, getattr(layer, "max_cache_len", None)) for layer in layers)


def _place(value: Any) -> tuple[Any, ...]:
    """Return the key of a recorded graph: the memory of a cache, and its numbers on the host."""
    parts = [part for layer in getattr(value, "layers", ()) for part in vars(layer).values()]
    numbers = [part for part in parts if type(part) is int]
    return *numbers, *(part.untyped_storage().data_ptr() for part in parts if isinstance(part, torch.Tensor))
