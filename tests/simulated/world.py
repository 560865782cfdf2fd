"""The simulated world: cards, a host and its clock replace torch.cuda and the profiler's clock."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity

import profiler.device.machine  # noqa: F401  patched below
from profiler import effort
from profiler.device import contention
from profiler.device.clock import no_gc
from profiler.device.contention import Neighbours
from profiler.device.telemetry import Watch
from profiler.facts.telemetry import Contention

from . import four_bit, nvml
from .card import Card
from .compiled import Compiled
from .cuda import Driver, strict
from .host import Host, SimulatedTime
from .mode import CardMode, copied
from .native import native
from .truth import Truth

TIMED = ("device.clock", "device.machine", "device.telemetry", "device.contention", "roofs.gemm", "roofs.measure")
"""Modules of the profiler that read a clock."""

ENOUGH = {
    "roofs.sampler.MOST_SAMPLES": 8, "roofs.sampler.CLOCK_READINGS_S": 2e-3, "roofs.measure.HOST_PACE_STEPS": 4,
    "roofs.measure._LEAST_RUNS": 2,
    "measure.overhead.OVERHEAD_MODEL_STEPS": 8, "measure.kernels.ENOUGH_SAMPLES": 8,
    "measure.schedule.MORE_PREFILLS": 1, "measure.schedule.TAIL_PREFILLS": 2,
}  # fmt: skip
"""Sample counts: a card without noise needs few samples, and its clock must be read despite so few."""


@dataclass(frozen=True)
class World:
    host: Host
    cards: tuple[Card, ...]

    @property
    def card(self) -> Card:
        return self.cards[0]

    def seconds(self, run: Callable[..., object], *arguments: Any, **named: Any) -> float:
        """Return the host's seconds of a call, including all its kernels."""
        torch.cuda.synchronize()
        start_s = self.host.now_s
        run(*arguments, **named)
        torch.cuda.synchronize()
        return self.host.now_s - start_s


@contextlib.contextmanager
def simulated(*truths: Truth, hurried: bool = True) -> Iterator[World]:
    """Give this process these cards and the clock of their host, within the context; `hurried` takes fewer samples."""
    with contextlib.suppress(ImportError):
        import bitsandbytes  # noqa: F401  it looks for libraries at import, for the cards that it finds
    host = Host()
    cards = tuple(Card(index, truth, host) for index, truth in enumerate(truths))
    mode = CardMode(cards, host)
    driver = Driver(cards, mode.known)
    world = World(host, cards)
    # Python's automatic garbage collections, and the card memory that they free, depend on everything that ran before.
    with no_gc(), pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for owner, name, value in _replaced(driver, host):
            patch.setattr(owner, name, value, raising=owner is not torch._C)
        patch.setitem(sys.modules, "pynvml", nvml.answers(cards))
        if four_bit.table() is not None:
            patch.setitem(sys.modules, four_bit.NAME, four_bit.table())
            four_bit.forget()
            stack.callback(four_bit.forget)
        brief = replace(effort.STANDARD, ceiling_s=0.1, shares={**effort.STANDARD.shares, "ceilings": 0.02})
        for name, value in {**ENOUGH, "effort.STANDARD": brief}.items() if hurried else ():
            patch.setattr(f"profiler.{name}", value)
        forget = sys.modules["profiler.device.machine"].side_stream.cache_clear
        forget()
        stack.callback(forget)  # a stream belongs to its card
        # `torch.tensor(data, device="cuda")` then makes a tensor on the host and moves it, as under torch's fake mode.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        native().begin(mode.known)
        stack.callback(native().end)
        stack.enter_context(mode)
        yield world
        if host.terminated_by is not None:
            raise RuntimeError("this process would have been terminated") from host.terminated_by


def _replaced(driver: Driver, host: Host) -> Iterator[tuple[Any, str, Any]]:
    """Yield each replaced attribute with its owner and its new value."""
    for name, value in strict(driver.names()).items():
        yield torch.cuda, name, value
    for name, value in driver.names_of_c().items():
        yield torch._C, name, value
    yield torch.accelerator, "synchronize", driver.synchronize
    yield torch.cuda.nvtx, "range_push", mock.Mock()
    yield torch.cuda.nvtx, "range_pop", mock.Mock()
    yield torch.version, "cuda", "13.0"
    # As in a build for CUDA. Otherwise torch's profiler raises and catches an error per operator.
    yield torch.autograd.profiler, "_supported_activities", lambda: {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    yield torch, "compile", partial(Compiled, host)
    # The simulated host has no other processes, whatever runs on this machine during the test.
    yield Neighbours, "look", lambda *_: Contention(0.0, 1)
    yield contention, "SCHEDSTAT_FILE", Path("no-waits-for-a-core")
    yield FakeTensor, "__new__", staticmethod(copied(FakeTensor.__new__))
    yield torch.Tensor, "__deepcopy__", _deepcopy(torch.Tensor.__deepcopy__)
    for module in TIMED:
        yield importlib.import_module(f"profiler.{module}"), "time", SimulatedTime(host)
    yield Watch, "__enter__", _begun(host)
    yield Watch, "__exit__", lambda watch, *_: host.forget(watch.alarm)


def _begun(host: Host) -> Any:
    """Let a watch read its source on the host's clock instead of in a thread."""

    def begin(watch: Any) -> Any:
        watch.alarm = host.every(watch.interval_s, lambda: watch.look(host.unix_at_start_s + host.now_s))
        return watch

    return begin


def _deepcopy(whole: Any) -> Any:
    """Handle `copy.deepcopy(tensor)` of a card: torch copies its storage, which only a build for CUDA can allocate."""

    def deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        if tensor.device.type != "cuda" or id(tensor) in memo:
            return whole(tensor, memo)
        memo[id(tensor)] = copied = tensor.clone()
        return copied

    return deepcopy
