"""The census replay: a cell's own matrix products, run alone in the model's order with the model's own weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from profiler.clock import Clock, clock_for

_LEAST_SAMPLES = 3


def replay_linears(
    linears: Mapping[str, Sequence[nn.Module]],
    rows: Mapping[str, int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    budget_s: float,
    clock: Clock | None = None,
) -> dict[str, float]:
    """Seconds that one call of each operator takes on its own: {operator: median seconds}.

    `linears` maps an operator to its modules, one a layer; `rows` gives its tokens. Modules are visited layer by
    layer, as in a step, so that each weight comes from where a step finds it: memory, or a cache that holds them all.
    """
    clock = clock or clock_for(device)
    inputs = {
        name: torch.randn(1, rows[name], _in_features(modules[0]), device=device, dtype=dtype)
        for name, modules in linears.items()
    }
    order = sorted(
        ((index / len(modules), name, module) for name, modules in linears.items() for index, module in enumerate(modules)),
        key=lambda item: item[0],
    )
    times: dict[str, list[float]] = {name: [] for name in linears}
    with torch.inference_mode():
        for _, name, module in _first_of_each(order):
            module(inputs[name])
        clock.synchronize()
        deadline = time.perf_counter() + budget_s
        full_passes = 0
        while full_passes == 0 or time.perf_counter() < deadline:
            marks = [clock.mark()]
            names = []
            for _, name, module in order:
                module(inputs[name])
                marks.append(clock.mark())
                names.append(name)
                if device.type == "cpu" and time.perf_counter() > deadline and _enough(times, names):
                    break
            clock.synchronize()
            for name, seconds in zip(names, clock.seconds(marks), strict=True):
                times[name].append(seconds)
            full_passes += 1
    return {name: statistics.median(samples) for name, samples in times.items() if samples}


def _enough(times: Mapping[str, list[float]], names: Sequence[str]) -> bool:
    return all(len(samples) + names.count(name) >= _LEAST_SAMPLES or name in names for name, samples in times.items())


def _first_of_each(order: Sequence[tuple[float, str, nn.Module]]) -> list[tuple[float, str, nn.Module]]:
    seen: dict[str, tuple[float, str, nn.Module]] = {}
    for item in order:
        seen.setdefault(item[1], item)
    return list(seen.values())


def _in_features(module: Any) -> int:
    return int(module.in_features if hasattr(module, "in_features") else module.weight.shape[0])
