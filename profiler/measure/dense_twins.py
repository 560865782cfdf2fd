"""Dense linears in place of a model's packed ones: what the packed format saves or costs, and up to which batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from profiler.device.clock import now_s, time_in_turn
from profiler.device.machine import Machine
from profiler.facts.measurements import BatchTimes, PackedBatches
from profiler.loading.request import dtype_name
from profiler.measure.replay import read_of, replay_of
from profiler.quant.storage import is_linear, stored

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batches of a decode step at which both are timed."""
_MOST_BYTES = 2 << 30
"""Bytes of dense weights at most. Layers share weights beyond that, and no cache of a CPU or GPU holds so many."""
_SPREAD = 0.02
"""Standard deviation of their random values, small enough that no activation overflows."""
_MOST_OF_A_SHAPE = 4
_ROUNDS = 3


@dataclass(frozen=True)
class PackedLinear:
    """A linear of packed weights, and its place in a model."""

    parent: nn.Module
    name: str
    module: Any

    @property
    def shape(self) -> tuple[int, int, bool]:
        """(inputs, outputs, whether it has a bias)."""
        return self.module.in_features, self.module.out_features, getattr(self.module, "bias", None) is not None

    @property
    def format(self) -> str:
        """The format as `stored` names it, or the module's class."""
        try:
            name = stored(self.module).format
        except (ValueError, AttributeError):
            name = "packed"
        return type(self.module).__name__ if name == "packed" else name


def packed_linears(model: nn.Module) -> list[PackedLinear]:
    """The linears of a model whose weights are not a plain matrix of floats of 16 or more bits."""
    return [
        PackedLinear(parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_linear(child) and type(child).__name__ != "Conv1D" and not _is_dense(child)
    ]


def _is_dense(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if weight is None or type(weight) not in (torch.Tensor, nn.Parameter):
        return False
    wide = weight.is_floating_point() and weight.itemsize > 1
    return bool(wide and tuple(weight.shape) == (module.out_features, module.in_features))


def dense_twins(linears: Sequence[PackedLinear], dtype: torch.dtype, room_bytes: float) -> list[nn.Linear]:
    """A dense linear of random weights for each packed one, in at most about `room_bytes`.

    If that is not enough for all, linears of a shape share weights in turn, as few as needed.
    """
    whole_bytes = sum(ins * outs for ins, outs, _ in (each.shape for each in linears)) * dtype.itemsize
    share = min(1.0, min(room_bytes, _MOST_BYTES) / max(1, whole_bytes))
    made: dict[tuple[int, int, bool], list[nn.Linear]] = {}
    twins = []
    for number, each in enumerate(linears):
        of_shape = made.setdefault(each.shape, [])
        count = sum(other.shape == each.shape for other in linears)
        if len(of_shape) < math.ceil(share * count):
            tensors = (*each.module.parameters(recurse=False), *each.module.buffers(recurse=False))
            device = tensors[0].device if tensors else torch.device("cpu")
            of_shape.append(_random_linear(*each.shape, dtype, device))
            twins.append(of_shape[-1])
        else:
            twins.append(of_shape[number % len(of_shape)])
    return twins


def _random_linear(ins: int, outs: int, bias: bool, dtype: torch.dtype, device: torch.device) -> nn.Linear:
    linear = nn.Linear(ins, outs, bias=bias, dtype=dtype, device="meta").to_empty(device=device)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.normal_(std=_SPREAD)
    return linear.requires_grad_(False)


@contextlib.contextmanager
def replaced(linears: Sequence[PackedLinear], twins: Sequence[nn.Linear]) -> Iterator[None]:
    """A context in which the model computes with `twins` in place of its packed linears."""
    try:
        for each, twin in zip(linears, twins, strict=True):
            setattr(each.parent, each.name, twin)
        yield
    finally:
        for each in linears:
            setattr(each.parent, each.name, each.module)


def times_by_batch(
    linears: Sequence[PackedLinear], twins: Sequence[nn.Linear], machine: Machine, until_s: float
) -> list[BatchTimes]:
    """The seconds at each of BATCHES, until the clock is at `until_s`. Four linears of a shape stand for all of it.

    On CUDA the linears of a side are replayed as a graph: one by one, a slow host's launches would be compared, which
    took 12.2 ms of nf4 next to 7.8 ms of dense Mistral-7B on an H200, where whole steps as graphs take 6.8 and 7.4.
    """
    pairs: dict[tuple[int, int, bool], list[tuple[Any, nn.Linear]]] = {}
    for each, twin in zip(linears, twins, strict=True):
        pairs.setdefault(each.shape, []).append((each.module, twin))
    times = []
    with torch.inference_mode():
        for batch in BATCHES:
            if now_s() >= until_s:
                break
            steps_s = np.zeros((2, _ROUNDS))
            least_s = np.zeros(2)
            for shape, of_shape in pairs.items():
                chosen = of_shape[:_MOST_OF_A_SHAPE]
                weight = chosen[0][1].weight
                x = torch.randn(batch, 1, shape[0], dtype=weight.dtype, device=weight.device)
                sides = ([packed for packed, _ in chosen], [dense for _, dense in chosen])
                seconds = _rounds(sides, x, machine) * len(of_shape) / len(chosen)
                steps_s += seconds
                least_s += seconds.min(axis=1)
            packed_s, dense_s = least_s.tolist()
            times.append(BatchTimes(batch, packed_s, dense_s, tuple((steps_s[0] / steps_s[1]).tolist())))
    return times


def _rounds(sides: Sequence[Sequence[Callable[..., object]]], x: torch.Tensor, machine: Machine) -> NDArray[np.float64]:
    """The seconds of each side in rounds that take turns, [side, round], after one round to warm up."""

    def run(modules: Sequence[Callable[..., object]]) -> None:
        for module in modules:
            module(x)

    calls: list[Callable[[], object]] = [partial(run, modules) for modules in sides]
    replays = [replay for call in calls if (replay := replay_of(call, machine)) is not None]
    cache_bytes, captured = machine.info.last_level_cache_bytes, len(replays) == len(calls)
    runs, flush = (replays, read_of(2 * cache_bytes, machine)) if captured else (calls, None)
    return np.array(time_in_turn(runs, machine.clock, _ROUNDS, drop_first=True, flush=flush))


def packed_batches(
    linears: Sequence[PackedLinear], dtype: torch.dtype, room_bytes: float, machine: Machine, budget_s: float
) -> PackedBatches | None:
    """Time a model's packed linears against dense ones of `dtype`, in at most about `budget_s`; None without any."""
    if not linears:
        return None
    until_s = now_s() + budget_s
    twins = dense_twins(linears, dtype, room_bytes)
    first, twin = linears[0].module, twins[0]
    x = torch.randn(1, 1, first.in_features, dtype=dtype, device=twin.weight.device)
    formats = " and ".join(dict.fromkeys(each.format for each in linears))
    times = times_by_batch(linears, twins, machine, until_s)
    return PackedBatches(formats, kernel_of(first, x), dtype_name(dtype), tuple(times))


def kernel_of(module: Any, x: torch.Tensor) -> str:
    """The operator that takes the longest in one call of a linear, such as `bitsandbytes::gemv_4bit`."""
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as seen:
        module(x)
    events = [event for event in seen.key_averages() if "::" in event.key]
    return str(max(events, key=lambda event: event.self_cpu_time_total).key) if events else ""
