"""The census replay: a cell's own matrix products and attention kernels, run alone.

The products run in the model's order with the model's own weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from profiler.machine.clock import Clock, Timing, clock_for, timing_of
from profiler.roofs.sampling import sample

Key = TypeVar("Key", bound=Hashable)


def replay_linears(
    linears: Mapping[Key, Sequence[nn.Module]],
    rows: Mapping[Key, int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    budget_s: float,
    clock: Clock | None = None,
    sliced: Collection[Key] = (),
) -> dict[Key, Timing]:
    """Seconds that one call of each operator takes on its own.

    `linears` maps an operator to its modules, one a layer; `rows` gives its tokens. Those of `sliced` operators are
    the last of so many prompts, handed over as transformers does: as a slice of the hidden states. That is not the same
    call: torch 2.13 takes 82 ms instead of 3 for the LM head of SmolLM2-135M in bfloat16 on two cores.
    """

    def input_of(name: Key, width: int) -> torch.Tensor:
        if name in sliced:
            return torch.randn(rows[name], 2, width, device=device, dtype=dtype)[:, -1:, :]
        return torch.randn(1, rows[name], width, device=device, dtype=dtype)

    inputs = {name: input_of(name, _in_features(modules[0])) for name, modules in linears.items()}
    calls = {name: [partial(module, inputs[name]) for module in modules] for name, modules in linears.items()}
    return replay_calls(calls, device=device, budget_s=budget_s, clock=clock)


def replay_calls(
    calls: Mapping[Key, Sequence[Callable[[], object]]],
    *,
    device: torch.device,
    budget_s: float,
    clock: Clock | None = None,
) -> dict[Key, Timing]:
    """Seconds that one call under each key takes on its own, where a key has one call a layer.

    Calls are made layer by layer, as in a step, so that each weight comes from where a step finds it: memory, or a
    cache that holds them all. On CUDA the calls of a key are captured as a graph and replayed: events around single
    calls of small kernels would time the host.
    """
    clock = clock or clock_for(device)
    if device.type == "cuda":
        each_s = budget_s / max(1, len(calls))
        return {name: _replayed_graph(layers, clock, each_s) for name, layers in calls.items()}
    order = sorted(
        ((index / len(layers), name, call) for name, layers in calls.items() for index, call in enumerate(layers)),
        key=lambda item: item[0],
    )
    times: dict[Key, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for layers in calls.values():
            layers[0]()
        clock.synchronize()
        deadline = time.perf_counter() + budget_s
        while not all(times.values()) or time.perf_counter() < deadline:
            marks, names = [clock.mark()], []
            for _, name, call in order:
                call()
                marks.append(clock.mark())
                names.append(name)
                # A pass over large inputs may take long; it ends early once each operator has been seen.
                if time.perf_counter() > deadline and set(names) == set(calls):
                    break
            clock.synchronize()
            for name, seconds in zip(names, clock.seconds(marks), strict=True):
                times[name].append(seconds)
    return {name: timing_of(samples) for name, samples in times.items()}


def replay_attention(
    *,
    batch: int,
    query: int,
    context: int,
    query_heads: int,
    kv_heads: int,
    qk_dim: int,
    v_dim: int,
    layers: int,
    device: torch.device,
    dtype: torch.dtype,
    budget_s: float,
    clock: Clock | None = None,
) -> Timing:
    """Seconds of one `scaled_dot_product_attention` at this shape, called as transformers calls it.

    Keys and values rotate over `layers` different ones, as the layers of a model do.
    """
    clock = clock or clock_for(device)
    keys = query + context
    q = torch.randn(batch, query_heads, query, qk_dim, device=device, dtype=dtype)
    k = [torch.randn(batch, kv_heads, keys, qk_dim, device=device, dtype=dtype) for _ in range(layers)]
    v = [torch.randn(batch, kv_heads, keys, v_dim, device=device, dtype=dtype) for _ in range(layers)]
    samples: list[float] = []
    if device.type == "cuda":
        grouped, causal = query_heads != kv_heads, query > 1 and context == 0
        attend = partial(F.scaled_dot_product_attention, q, is_causal=causal, enable_gqa=grouped)
        calls = [partial(attend, key=k[layer], value=v[layer]) for layer in range(layers)]
        return _replayed_graph(calls, clock, budget_s)
    with torch.inference_mode():
        deadline = time.perf_counter() + budget_s
        while len(samples) < 2 * layers or time.perf_counter() < deadline:
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
            if time.perf_counter() > deadline + budget_s:
                break
    return timing_of(samples)


def _replayed_graph(calls: Sequence[Callable[[], object]], clock: Clock, budget_s: float) -> Timing:
    """Seconds of one of `calls` on the device alone: all of them captured as one CUDA graph and replayed.

    A call that cannot be captured (one that waits for the device) is timed with events instead.
    """
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
            again: Callable[[], object] = graph.replay
        except RuntimeError:

            def again() -> None:
                for call in calls:
                    call()

        return timing_of([seconds / len(calls) for seconds in sample(again, clock, budget_s)])


def _in_features(module: Any) -> int:
    return int(module.in_features if hasattr(module, "in_features") else module.weight.shape[0])
