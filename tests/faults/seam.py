"""All calls that may fail: each is recorded by name, and fails if an injection says so."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from simulated.card import Card
from simulated.compiled import Compiled
from simulated.host import SimulatedTime
from simulated.world import World

from profiler.run.stages import Stages

from .kinds import KINDS, NEEDS_DEVICE
from .sites import Call, Injection, Site, caller, from_simulator, place_of

_FUNCTIONS = (
    "set_device", "current_device", "get_device_properties", "get_device_capability", "get_device_name",
    "is_bf16_supported", "mem_get_info", "memory_allocated", "memory_reserved", "max_memory_allocated",
    "reset_peak_memory_stats", "empty_cache", "synchronize", "current_stream", "set_stream", "stream",
)  # fmt: skip
"""Functions of torch.cuda."""
_METHODS = {
    "Event": ("__init__", "record", "elapsed_time", "synchronize"),
    "Stream": ("__init__",),
    "CUDAGraph": ("__init__", "capture_begin", "capture_end", "replay"),
    "graph": ("__enter__",),
}
"""Methods of classes of torch.cuda."""
_WITHIN_TORCH = frozenset({"torch.cuda.CUDAGraph.capture_begin", "torch.cuda.CUDAGraph.capture_end"})
"""Called by `torch.cuda.graph`, which the simulated card provides."""
_FAILS_AT_ITS_END = frozenset({"torch.cuda.CUDAGraph.capture_end"})
"""The capture has then ended, whatever happens to the graph (aten/src/ATen/cuda/CUDAGraph.cpp)."""
_OPERATORS = ("_fused_sdp_choice", "_scaled_mm", "_int_mm", "_grouped_mm")
"""Functions of torch that are called by name."""
_PROFILER = ("__enter__", "__exit__", "events", "export_chrome_trace")
_LIBRARIES = {
    "bitsandbytes": ("matmul", "matmul_4bit"),
    "bitsandbytes.functional": (
        "quantize_4bit", "dequantize_4bit", "quantize_blockwise", "dequantize_blockwise", "int8_vectorwise_quant",
        "int8_linear_matmul", "int8_mm_dequant", "gemv_4bit",
    ),
    "torchao.quantization": ("quantize_",),
}  # fmt: skip
"""Functions of libraries, where these are imported."""
Wrapped = Callable[..., Any]


class Seam:
    """Counts calls by site within `installed`, and makes them fail as the injection says."""

    def __init__(self, world: World, injection: Injection | None = None) -> None:
        self._world = world
        self._injection = injection
        self._kind: Any = KINDS[injection.kind] if injection else None
        self._numbers: Counter[Site] = Counter()
        self._lost: BaseException | None = None
        self._stage = self._cell = ""
        self.calls: list[Call] = []
        """All calls, if there is no injection."""
        self.fired: list[Call] = []
        """The failed calls, without those that follow from a broken context."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in self._patches():
                if replacement is not getattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, replacement))
            self._hook_card()
            yield

    def call(self, api: str, real: Wrapped, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call `real` for the caller's caller."""
        frame = caller(2)
        if from_simulator(frame) and api not in _WITHIN_TORCH:
            return real(*args, **kwargs)
        call = self._reached(api, frame)
        if call is None:
            return real(*args, **kwargs)
        if self._kind.raised is not None:
            if api in _FAILS_AT_ITS_END:
                real(*args, **kwargs)
            raise self._kind.raised()
        if self._kind.lie is not None:
            return self._kind.lie(real(*args, **kwargs))
        host = self._world.host
        before_s = host.now_s
        result = real(*args, **kwargs)
        host.advance((self._kind.slow - 1) * (host.now_s - before_s))
        return result

    def _reached(self, api: str, frame: Any) -> Call | None:
        """Count a call, and return it if it must fail. Raises the error of an already broken device."""
        if self._lost is not None:
            if api in NEEDS_DEVICE:
                raise type(self._lost)(*self._lost.args)
            return None
        if self._injection is not None and api != self._injection.site.api:
            return None
        place = place_of(frame)
        if place is None:
            return None
        site = Site(api, place)
        self._numbers[site] += 1
        call = Call(site, self._numbers[site], self._stage, self._cell)
        if self._injection is None:
            self.calls.append(call)
            return None
        if not (self.fired and self._kind.spreads) and not self._injection.hits(site, call.number):
            return None
        self.fired.append(call)
        if self._kind.sticky:
            self._lost = self._kind.raised()
        return call

    def _hook_card(self) -> None:
        """Record kernels and allocations, which the C++ card reports. Hooks take time: set them only if needed."""
        for card in self._world.cards:
            if self._asked("kernel"):
                card.core.on_kernel = partial(self._launched, card)
            if self._asked("allocate"):
                card.memory.on_allocate = self._allocated

    def _launched(self, card: Card, *kernel: Any) -> None:
        """Fail or slow down a launched kernel; of a replayed graph, its first kernel."""
        *_, launched, _operators, duration_s, _start_s = kernel
        if launched and self._reached("kernel", caller(1)) is not None:
            if self._kind.raised is not None:
                raise self._kind.raised()
            card.stream.core.ready_s += (self._kind.slow - 1) * duration_s

    def _allocated(self, _bytes: int) -> None:
        if self._reached("allocate", caller(1)) is not None:
            raise self._kind.raised()

    def _patches(self) -> Iterator[tuple[Any, str, Any]]:
        yield from self._tracking()
        cuda: Any = torch.cuda
        yield from self._wrapped("torch.cuda", cuda, _FUNCTIONS)
        for kind, names in _METHODS.items():
            yield from self._wrapped(f"torch.cuda.{kind}", getattr(cuda, kind), names)
        yield from self._wrapped("torch.cuda.nvtx", cuda.nvtx, ("range_push", "range_pop"))
        yield from self._wrapped("torch.nn.functional", torch.nn.functional, ("scaled_dot_product_attention",))
        yield from self._wrapped("torch", torch, _OPERATORS)
        yield from self._wrapped("torch.profiler.profile", torch.profiler.profile, _PROFILER)
        yield Compiled, "__call__", self._wrap("torch.compile", Compiled.__call__)
        yield from self._wrapped("time", SimulatedTime, ("perf_counter",))
        nvml = sys.modules["pynvml"]
        yield from self._wrapped("pynvml", nvml, [each for each in dir(nvml) if each.startswith("nvml")])
        for module, names in _LIBRARIES.items():
            if module in sys.modules:
                yield from self._wrapped(module, sys.modules[module], names)

    def _wrapped(self, prefix: str, owner: Any, names: Iterable[str]) -> Iterator[tuple[Any, str, Any]]:
        for name in names:
            api = prefix if name == "__init__" else f"{prefix}.{name}"
            yield owner, name, self._wrap(api, getattr(owner, name))

    def _asked(self, api: str) -> bool:
        """Return whether to record calls of an API: in a run with a fault, only those that the fault may hit."""
        if self._injection is None:
            return True
        return api == self._injection.site.api or (self._kind.sticky and api in NEEDS_DEVICE)

    def _wrap(self, api: str, real: Wrapped) -> Wrapped:
        """Record the calls of a function."""
        if not self._asked(api):
            return real

        @wraps(real)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return self.call(api, real, args, kwargs)

        return wrapped

    def _tracking(self) -> Iterator[tuple[Any, str, Any]]:
        """Track the stage of the run and the visited cell."""
        begin, sweep = Stages.begin, importlib.import_module("profiler.measure.sweep")
        visit = sweep.visit

        @wraps(begin)
        def begun(stages: Stages, name: str, text: str = "") -> None:
            self._stage = name
            begin(stages, name, text)

        @wraps(visit)
        def visited(engine: Any, cell: Any, *args: Any, **kwargs: Any) -> Any:
            self._cell = f"{cell.engine}/{cell.batch_size}/{cell.depth}"
            try:
                return visit(engine, cell, *args, **kwargs)
            finally:
                self._cell = ""

        yield Stages, "begin", begun
        yield sweep, "visit", visited
