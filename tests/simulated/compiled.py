"""torch.compile on a simulated card: the same kernels after a compilation, as a graph on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .host import Host

COMPILATION_S = 20.0
"""Seconds to compile a step of about twenty layers on a machine with a few cores, with an empty inductor cache."""
RECORDING_S = 0.5
"""Launch of a graph."""
_REGION = "Torch-Compiled Region: 0/0"


@dataclass
class _Shape:
    """The compiled code for one shape of token and one cache."""

    calls: int = 0
    graph: Any = None
    token: Any = None
    output: Any = None


class Compiled:
    """A function of a token and a cache; with `captured` replayed as a CUDA graph from its third call on.

    A number on the host among its arguments is part of the graph's key, as for torch's cudagraph trees: another value
    records the graph again.
    """

    def __init__(self, host: Host, function: Callable[..., Any], *, captured: bool) -> None:
        self._host = host
        self._function = function
        self._captured = captured
        self._shapes: dict[Any, _Shape] = {}
        self._compiled: set[Any] = set()

    def __call__(self, token: torch.Tensor, *caches: Any) -> Any:
        with torch.profiler.record_function(_REGION):
            return self._run(token, *caches)

    def _run(self, token: torch.Tensor, *caches: Any) -> Any:
        compiled = tuple(token.shape), *map(id, caches)
        if compiled not in self._compiled:
            self._compiled.add(compiled)
            self._host.advance(COMPILATION_S)
        if not self._captured:
            return self._function(token, *caches)
        shape = self._shapes.setdefault((compiled, *map(_numbers, caches)), _Shape())
        shape.calls += 1
        if shape.calls < 3:
            return self._function(token, *caches)
        if shape.graph is None:
            self._host.advance(RECORDING_S)
            shape.token = token.clone()
            shape.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(shape.graph):
                shape.output = self._function(shape.token, *caches)
        shape.token.copy_(token)
        shape.graph.replay()
        return shape.output


def _numbers(cache: Any) -> tuple[Any, ...]:
    layers = getattr(cache, "layers", ())
    return tuple(value for layer in layers for value in vars(layer).values() if type(value) is int)


def compiler(host: Host) -> Callable[..., Compiled]:
    """Return torch.compile, if this host compiles."""

    def compiled(function: Callable[..., Any], *, mode: str | None = None, **_: Any) -> Compiled:
        return Compiled(host, function, captured=mode == "reduce-overhead")

    return compiled
