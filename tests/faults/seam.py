"""All calls that may fail: each is recorded by name, and fails if an injection says so."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from pathlib import Path
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
_IMPORTED = ("pynvml", "bitsandbytes", "torchao", "matplotlib")
"""Libraries that may be missing or broken while roofscope itself works."""
_DISK = ("fsync", "replace", "mkdir")
"""Functions of os."""

Wrapped = Callable[..., Any]


class Seam:
    """Counts calls by site within `installed`, and makes them fail as the injection says."""

    def __init__(self, world: World, folders: Sequence[Path], injection: Injection | None = None) -> None:
        """`folders`: only writes below them are recorded."""
        self._world = world
        self._folders = tuple(f"{folder}{os.sep}" for folder in folders)
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
        metadata = importlib.import_module("importlib.metadata")
        yield metadata, "version", self._wrap(lambda name: f"importlib.metadata.version {name}", metadata.version)
        yield builtins, "__import__", self._wrap(_imported, builtins.__import__)
        yield importlib, "import_module", self._wrap(_imported, importlib.import_module)
        reals = {"fsync": lambda _: None}  # not tested: whether the disk really stores the data
        for name in _DISK:
            yield os, name, self._wrap(partial(self._written, f"disk {name}"), reals.get(name, getattr(os, name)))
        opened = self._open(builtins.open)
        yield builtins, "open", opened
        yield io, "open", opened

    def _wrapped(self, prefix: str, owner: Any, names: Iterable[str]) -> Iterator[tuple[Any, str, Any]]:
        for name in names:
            api = prefix if name == "__init__" else f"{prefix}.{name}"
            yield owner, name, self._wrap(api, getattr(owner, name))

    def _asked(self, api: str) -> bool:
        """Return whether to record calls of an API: in a run with a fault, only those that the fault may hit."""
        if self._injection is None:
            return True
        return api == self._injection.site.api or (self._kind.sticky and api in NEEDS_DEVICE)

    def _wrap(self, api: str | Callable[..., str | None], real: Wrapped) -> Wrapped:
        """Record the calls of a function. `api` may depend on the arguments; None: this call cannot fail."""
        if isinstance(api, str) and not self._asked(api):
            return real

        @wraps(real)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            name = api if isinstance(api, str) else api(*args)
            return real(*args, **kwargs) if name is None else self.call(name, real, args, kwargs)

        return wrapped

    def _written(self, api: str, target: Any, *_: Any) -> str | None:
        """A call with a path below the folders, or with an open file: only files below them get fsync."""
        return api if isinstance(target, int) or str(target).startswith(self._folders) else None

    def _open(self, real: Wrapped) -> Wrapped:
        @wraps(real)
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wax+") or not str(file).startswith(self._folders):
                return real(file, mode, *args, **kwargs)
            return _File(self.call("disk open", real, (file, mode, *args), kwargs), self)

        return opened if self._asked("disk open") or self._asked("disk write") else real

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


def _imported(name: str, *_: Any) -> str | None:
    """A submodule is missing in some versions; a library without a top-level module is broken."""
    library, *modules = name.split(".")
    own = caller(2).f_globals.get("__name__", "").startswith("profiler")
    return f"import {name if len(modules) > 1 else library}" if library in _IMPORTED and own else None


class _File:
    """An open file whose writes may fail."""

    def __init__(self, file: Any, seam: Seam) -> None:
        self._file = file
        self._seam = seam

    def write(self, *args: Any) -> Any:
        return self._seam.call("disk write", self._file.write, args, {})

    def writelines(self, *args: Any) -> Any:
        return self._seam.call("disk write", self._file.writelines, args, {})

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
