"""How a roof is sampled: warmed up, in groups that the clock can tell apart, with the device's own clock beside it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from profiler.machine.clock import time_calls
from profiler.machine.machine import Machine
from profiler.machine.telemetry import Watch
from profiler.roofs.values import Roof

STAGE_BUDGET_S = 1.5
# Drawing random numbers takes far longer than copying them, and what is read is as random in the second copy.
_TILE_BYTES = 16 << 20
_LEAST_SAMPLES = 5
_MOST_SAMPLES = 100
_STEADY_RATIO = 1.05
_LEAST_SAMPLE_S = 1e-3
_CLOCK_LOOKS_S = 0.1


def clocked(probe: Callable[[], Roof], machine: Machine) -> Roof:
    """A probe's roof with the clock that the device reported while it ran."""
    with Watch(machine.source, interval_s=_CLOCK_LOOKS_S) as watch:
        roof = probe()
    clocks = [reading.clock_hz for reading in watch.readings if reading.clock_hz is not None]
    return replace(roof, clock_hz=statistics.median(clocks) if clocks else None)


def sample(call: Callable[[], object], machine: Machine, budget_s: float) -> list[float]:
    """Seconds a call: warmed up until three calls in a row agree, then sampled until `budget_s` is spent.

    Calls shorter than a millisecond are timed in groups, so that the clock's resolution does not matter.
    """
    deadline = machine.now_s() + budget_s
    recent = time_calls(call, machine.clock, 3)
    while max(recent) > _STEADY_RATIO * min(recent) and machine.now_s() < deadline - budget_s / 2:
        recent = [*recent[1:], *time_calls(call, machine.clock, 1)]
    group = max(1, int(_LEAST_SAMPLE_S / max(min(recent), 1e-9)))
    samples: list[float] = []
    while len(samples) < _LEAST_SAMPLES or machine.now_s() < deadline:
        samples.append(round(sum(time_calls(call, machine.clock, group)) / group, 12))
        if len(samples) >= _MOST_SAMPLES or (len(samples) >= 2 and machine.now_s() > deadline + budget_s):
            break
    return samples


def random_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """So many bytes of random float32 (whole elements): a tile of them, again and again. Shape [elements]."""
    elements = nbytes // 4
    tile = torch.rand(min(elements, _TILE_BYTES // 4), device=device)
    data = torch.empty(elements, device=device)
    for part in data.split(tile.numel()):
        part.copy_(tile[: part.numel()])
    return data


def roof_of(work: float, seconds: Sequence[float], method: str) -> Roof:
    """The roof that so much work a call has, by the seconds of its calls."""
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return Roof(
        per_s=work / statistics.median(seconds),
        low_per_s=work / quartiles[2],
        high_per_s=work / quartiles[0],
        samples=len(seconds),
        method=method,
        seconds=tuple(seconds),
    )
