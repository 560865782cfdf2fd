"""The roofs that no dtype decides: streams past the cache, bandwidth over sizes, launches, fresh pages."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

from profiler.machine.clock import time_calls
from profiler.machine.machine import Machine
from profiler.machine.memory import page_faults
from profiler.roofs.sampling import clocked, roof_of, sample
from profiler.roofs.values import READ, Ceilings, CurvePoint, Roof

# 4x the last-level cache, as BabelStream and STREAM ask for, so that the cache cannot serve the stream.
_STREAM_CACHE_MULTIPLE = 4
_STREAM_LEAST_BYTES = 256 << 20
_STREAM_MOST_BYTES = 2 << 30
_STREAM_MEMORY_SHARE = 0.1
_CURVE_SMALLEST = 1 << 20
# CUDA's launch queue holds about a thousand; past that the device would be timed instead of the host.
_LAUNCHES = 500
# Larger than what malloc ever takes from its heap (32 MiB, glibc's DEFAULT_MMAP_THRESHOLD_MAX): fresh at each call.
_FRESH_BYTES = 64 << 20
_FRESH_BUFFERS = 5


def measure_page_fault_s(machine: Machine) -> float:
    """Seconds a page that filling a fresh buffer takes beyond filling it again, all threads at work."""
    costs = []
    for _ in range(_FRESH_BUFFERS):
        fresh = torch.empty(_FRESH_BYTES, dtype=torch.uint8)
        before = page_faults()
        first_s, again_s = time_calls(partial(fresh.fill_, 1), machine.clock, 2)
        if pages := page_faults() - before:
            costs.append((first_s - again_s) / pages)
    return max(0.0, statistics.median(costs)) if costs else 0.0


def measure_streams(machine: Machine, stage_budget_s: float) -> Ceilings:
    """The roofs that no dtype decides."""
    info = machine.info
    wanted = max(_STREAM_CACHE_MULTIPLE * info.last_level_cache_bytes, _STREAM_LEAST_BYTES)
    stream_bytes = min(wanted, _STREAM_MOST_BYTES, int(machine.available_bytes() * _STREAM_MEMORY_SHARE))
    memory = _streams(machine, stream_bytes, stage_budget_s)
    return Ceilings(
        compute={},
        memory=memory,
        stream_bytes=stream_bytes,
        beyond_cache=stream_bytes >= _STREAM_CACHE_MULTIPLE * info.last_level_cache_bytes,
        curve=_curve(machine, stream_bytes, stage_budget_s),
        launch=_launch(machine),
        measured_at_unix_s=machine.unix_s(),
    )


def _streams(machine: Machine, nbytes: int, budget_s: float) -> dict[str, Roof]:
    """Read-dominant stream, copy and triad. Bytes by STREAM's convention (a write is counted once)."""
    elements = nbytes // 4
    a = torch.rand(elements, device=machine.device)

    def probe(nbytes: int, call: Callable[[], object], budget_s: float, method: str) -> Roof:
        return clocked(lambda: roof_of(nbytes, sample(call, machine, budget_s), method), machine)

    # Copy and triad share the budget of memory with `a`: three buffers of a third each.
    third = elements // 3
    x, y, z = a[:third], a[third : 2 * third], a[2 * third : 3 * third]
    return {
        READ: probe(nbytes, a.sum, budget_s, f"sum of {nbytes >> 20} MiB"),
        "copy": probe(8 * third, lambda: z.copy_(x), budget_s / 2, "1 read, 1 write"),
        "triad": probe(12 * third, lambda: torch.add(x, y, alpha=3.0, out=z), budget_s / 2, "2 reads, 1 write"),
    }


def _curve(machine: Machine, largest: int, budget_s: float) -> tuple[CurvePoint, ...]:
    """Read bandwidth of buffers from 1 MiB on, each twice the last."""
    sizes = [_CURVE_SMALLEST << power for power in range(64) if _CURVE_SMALLEST << power <= largest]
    data = torch.rand(largest // 4, device=machine.device)
    points = []
    for size in sizes:
        part = data[: size // 4]
        roof = roof_of(size, sample(part.sum, machine, budget_s / max(1, len(sizes))), "read")
        points.append(CurvePoint(size, roof.per_s))
    return tuple(points)


def _launch(machine: Machine) -> dict[str, float]:
    """Seconds a tiny kernel costs: to submit one, and, on CUDA, to run one when a graph replays them back to back."""
    x = torch.zeros(1, device=machine.device)

    def submit() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1)

    x.add_(1)
    machine.clock.synchronize()
    start = machine.now_s()
    submit()
    costs = {"submit_s": (machine.now_s() - start) / _LAUNCHES}
    machine.clock.synchronize()
    if machine.captures:
        costs["device_s"] = statistics.median(sample(machine.capture(submit), machine, 0.1)) / _LAUNCHES
    return costs
