"""The census replay: a cell's own matrix products and attention kernels, run alone.

The products run in the model's order with the model's own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from profiler.errors import RequestError
from profiler.machine.clock import timing_of
from profiler.machine.machine import Machine
from profiler.roofs.sampling import sample

Key = TypeVar("Key", bound=Hashable)


def replay_linears(
    linears: Mapping[Key, Sequence[nn.Module]],
    rows: Mapping[Key, int],
    machine: Machine,
    *,
    dtype: torch.dtype,
    budget_s: float,
    sliced: Collection[Key] = (),
) -> dict[Key, tuple[float, ...]]:
    """Seconds of single calls of each operator on its own.

    `linears` maps an operator to its modules, one a layer; `rows` gives its tokens. Those of `sliced` operators are
    the last of so many prompts, handed over as transformers does: as a slice of the hidden states. That is not the same
    call: torch 2.13 takes 82 ms instead of 3 for the LM head of SmolLM2-135M in bfloat16 on two cores.
    """

    def input_of(name: Key, width: int) -> torch.Tensor:
        if name in sliced:
            return torch.randn(rows[name], 2, width, device=machine.device, dtype=dtype)[:, -1:, :]
        return torch.randn(1, rows[name], width, device=machine.device, dtype=dtype)

    inputs = {name: input_of(name, _in_features(modules[0])) for name, modules in linears.items()}
    calls = {name: [partial(module, inputs[name]) for module in modules] for name, modules in linears.items()}
    return replay_calls(calls, machine, budget_s=budget_s)


def replay_calls(
    calls: Mapping[Key, Sequence[Callable[[], object]]], machine: Machine, *, budget_s: float
) -> dict[Key, tuple[float, ...]]:
    """Seconds of single calls under each key on their own, where a key has one call a layer.

    Calls are made layer by layer, as in a step, so that each weight comes from where a step finds it: memory, or a
    cache that holds them all, until each key is known to within 1 % or the budget is spent. On CUDA the calls of a key
    are captured as a graph and replayed: events around single calls of small kernels would time the host.
    """
    clock = machine.clock
    if machine.captures:
        each_s = budget_s / max(1, len(calls))
        return {name: _replayed_graph(layers, machine, each_s) for name, layers in calls.items()}
    order = sorted(
        ((index / len(layers), name, call) for name, layers in calls.items() for index, call in enumerate(layers)),
        key=lambda item: item[0],
    )
    times: dict[Key, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for layers in calls.values():
            layers[0]()
        clock.synchronize()
        deadline_s = machine.now_s() + budget_s
        while not all(times.values()) or (machine.now_s() < deadline_s and not all(map(_known, times.values()))):
            marks, names = [clock.mark()], []
            for _, name, call in order:
                call()
                marks.append(clock.mark())
                names.append(name)
                # A pass over large inputs may take long; it ends early once each operator has been seen.
                if machine.now_s() > deadline_s and set(names) == set(calls):
                    break
            clock.synchronize()
            for name, seconds in zip(names, clock.seconds(marks), strict=True):
                times[name].append(seconds)
    return {name: tuple(samples) for name, samples in times.items()}


_ENOUGH_SAMPLES = 32
_KNOWN_HALF_WIDTH = 0.01


def _known(samples: Sequence[float]) -> bool:
    """Whether further samples would hardly move a median."""
    if len(samples) < _ENOUGH_SAMPLES:
        return False
    timing = timing_of(samples)
    return timing.half_width_s <= _KNOWN_HALF_WIDTH * timing.median_s


def replay_attention(
    machine: Machine,
    *,
    batch: int,
    query: int,
    context: int,
    query_heads: int,
    kv_heads: int,
    qk_dim: int,
    v_dim: int,
    layers: int,
    dtype: torch.dtype,
    budget_s: float,
) -> tuple[float, ...]:
    """Seconds of single calls of `scaled_dot_product_attention` at this shape, called as transformers calls it.

    Keys and values rotate over `layers` different ones, as the layers of a model do.
    """
    clock, device = machine.clock, machine.device
    keys = query + context
    q = torch.randn(batch, query_heads, query, qk_dim, device=device, dtype=dtype)
    k = [torch.randn(batch, kv_heads, keys, qk_dim, device=device, dtype=dtype) for _ in range(layers)]
    v = [torch.randn(batch, kv_heads, keys, v_dim, device=device, dtype=dtype) for _ in range(layers)]
    samples: list[float] = []
    if machine.captures:
        grouped, causal = query_heads != kv_heads, query > 1 and context == 0
        attend = partial(F.scaled_dot_product_attention, q, is_causal=causal, enable_gqa=grouped)
        calls = [partial(attend, key=k[layer], value=v[layer]) for layer in range(layers)]
        return _replayed_graph(calls, machine, budget_s)
    with torch.inference_mode():
        deadline_s = machine.now_s() + budget_s
        while len(samples) < 2 * layers or (machine.now_s() < deadline_s and not _known(samples)):
            marks = [clock.mark()]
            for layer in range(layers):
                F.scaled_dot_product_attention(
                    q,
                    k[layer],
                    v[layer],
                    is_causal=query > 1 and context == 0,
                    enable_gqa=query_heads != kv_heads,
                )
                marks.append(clock.mark())
            clock.synchronize()
            samples += clock.seconds(marks)
            if machine.now_s() > deadline_s + budget_s:
                break
    return tuple(samples)


def _replayed_graph(calls: Sequence[Callable[[], object]], machine: Machine, budget_s: float) -> tuple[float, ...]:
    """Seconds of one of `calls` on the device alone: all of them captured as one graph and replayed.

    A call that cannot be captured (one that waits for the device) is timed with events instead.
    """

    def every() -> None:
        for call in calls:
            call()

    with torch.inference_mode():
        with machine.beside():
            every()
        again: Callable[[], object]
        try:
            again = machine.capture(every)
        except RequestError:
            again = every
        return tuple(round(seconds / len(calls), 12) for seconds in sample(again, machine, budget_s))


def _in_features(module: Any) -> int:
    return int(module.in_features if hasattr(module, "in_features") else module.weight.shape[0])
