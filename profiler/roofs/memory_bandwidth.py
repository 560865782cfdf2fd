"""The memory roof: reads of large buffers and of the model's own weights."""

from __future__ import annotations

import math
import mmap
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from profiler.device.clock import time_calls
from profiler.device.machine import Machine
from profiler.device.memory import inner_tensors, page_faults
from profiler.facts.roofs import COPY, READ, TRIAD, Ceilings, CurvePoint, Roof, WeightReadRoof, agree
from profiler.roofs.sampler import attempt, clocked, random_bytes, record, roof_of, sample, sample_on_device

# Four times the last-level caches in all, as BabelStream and STREAM ask for, so that they cannot serve the stream.
_STREAM_CACHE_MULTIPLE = 4
# From here on two sizes must agree: the largest cache behind one that a device tells of is MI300X's, of 256 MiB.
_STREAM_LEAST_BYTES = 256 << 20
_STREAM_MEMORY_SHARE = 0.1
_CURVE_SMALLEST = 1 << 20
# What one size takes of a stage's time; those that are tried for a plateau may take another whole stage together.
_POINT_SHARE = 1 / 12
# CUDA's launch queue holds about a thousand; past that the device would be timed instead of the host.
_LAUNCHES = 500
# As large as what a prefill hands from one kernel to the next. A page of 64 MiB, which no near cache holds, costs less
# beyond its filling: 0.6 us on a Xeon where steps with 350,000 faults took 1.2 us longer for each, and 8 MiB give 1.1.
_FRESH_BYTES = 8 << 20
_FRESH_BUFFERS = 32


def measure_page_fault_s(machine: Machine) -> float:
    """Seconds a page of taking a fresh buffer, filling it and giving it back, beyond filling one that is there, all
    threads at work."""
    there = torch.zeros(_FRESH_BYTES, dtype=torch.uint8)
    costs = []
    for _ in range(_FRESH_BUFFERS):
        before = page_faults()
        [fresh_s] = time_calls(_fill_fresh, machine.clock, 1)
        pages = page_faults() - before
        [again_s] = time_calls(partial(there.fill_, 1), machine.clock, 1)
        if pages:
            costs.append((fresh_s - again_s) / pages)
    return max(0.0, statistics.median(costs)) if costs else 0.0


def _fill_fresh() -> None:
    with mmap.mmap(-1, _FRESH_BYTES) as pages:
        fresh = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
        del fresh  # a map that something still looks into cannot be closed


def measure_streams(machine: Machine, stage_budget_s: float) -> Ceilings:
    """The roofs that no dtype decides; each that fails is named in `missing`. Raises DeviceError."""
    missing: dict[str, str] = {}
    curve = _curve(machine, stage_budget_s, missing)
    stream_bytes = curve[-1].nbytes if curve else _STREAM_LEAST_BYTES
    memory = _streams(machine, stream_bytes, stage_budget_s, missing)
    launch: dict[str, float] = {}
    with attempt("launches", machine, missing):
        launch = _launch(machine)
    return Ceilings(
        compute={},
        memory=memory,
        stream_bytes=stream_bytes,
        beyond_cache=_is_beyond(curve, machine.info.last_level_cache_bytes),
        curve=curve,
        launch=launch,
        measured_at_unix_s=machine.unix_s(),
        missing=missing,
    )


def measure_read(machine: Machine, nbytes: int, budget_s: float) -> Roof:
    """Bytes a second of reading so many again and again."""
    return _read(machine, random_bytes(nbytes, machine.device), budget_s)


def _read(machine: Machine, data: torch.Tensor, budget_s: float) -> Roof:
    return roof_of(data.nbytes, sample_on_device(data.sum, machine, budget_s), f"sum of {data.nbytes >> 20} MiB")


def _streams(machine: Machine, nbytes: int, budget_s: float, missing: dict[str, str]) -> dict[str, Roof]:
    """Read-dominant stream, copy and triad, each over all of `nbytes`. Bytes by STREAM's convention (a write is counted
    once)."""
    found: dict[str, Roof] = {}
    with attempt(f"{READ}, {COPY} and {TRIAD}", machine, missing):
        data = random_bytes(nbytes, machine.device)
        source, target = data.chunk(2)
        x, y, z = data[: 3 * (data.numel() // 3)].chunk(3)

        def probe(moved: int, call: Callable[[], object], method: str) -> Roof:
            return roof_of(moved, sample_on_device(call, machine, budget_s / 2), method)

        probes = {
            READ: lambda: _read(machine, data, budget_s),
            COPY: lambda: probe(2 * source.nbytes, lambda: target.copy_(source), "1 read, 1 write"),
            TRIAD: lambda: probe(3 * x.nbytes, lambda: torch.add(x, y, alpha=3.0, out=z), "2 reads, 1 write"),
        }
        for name, measured in probes.items():
            with attempt(name, machine, missing):
                found[name] = clocked(measured, machine)
    return found


def _curve(machine: Machine, budget_s: float, missing: dict[str, str]) -> tuple[CurvePoint, ...]:
    """Read bandwidth of buffers from 1 MiB on, each twice the last, until two of them agree past every cache.

    A device may tell of one cache and have another behind it, or share one with neighbours: past four times what it
    tells, sizes go on growing until reading them takes as long a byte, as far as a tenth of the memory and the time go.
    """
    past_bytes = max(_STREAM_CACHE_MULTIPLE * machine.info.last_level_cache_bytes, _STREAM_LEAST_BYTES)
    points: list[CurvePoint] = []
    nbytes = _CURVE_SMALLEST
    with attempt("reads of several sizes", machine, missing):
        room = machine.available_bytes() * _STREAM_MEMORY_SHARE
        data = random_bytes(int(min(_STREAM_LEAST_BYTES, max(room, _CURVE_SMALLEST))), machine.device)
        while nbytes <= data.nbytes:
            with attempt("reads of some sizes", machine, missing):
                points.append(_point(machine, data[: nbytes // 4], budget_s))
            nbytes *= 2
        del data
        deadline_s = machine.now_s() + budget_s
        while nbytes <= room and not _is_past(points, past_bytes):
            start_s = machine.now_s()
            points.append(_point(machine, random_bytes(nbytes, machine.device), budget_s))
            nbytes *= 2
            now_s = machine.now_s()
            if now_s + 2 * (now_s - start_s) > deadline_s:
                break
    return tuple(points)


def _point(machine: Machine, data: torch.Tensor, budget_s: float) -> CurvePoint:
    seconds = sample_on_device(data.sum, machine, _POINT_SHARE * budget_s)
    return CurvePoint(data.nbytes, data.nbytes / statistics.median(seconds))


def _is_past(points: Sequence[CurvePoint], past_bytes: int) -> bool:
    """Whether the two largest sizes both lie past every cache that is known of, and agree."""
    if len(points) < 2:
        return False
    smaller, larger = points[-2:]
    return smaller.nbytes >= past_bytes and agree(smaller.bytes_per_s, larger.bytes_per_s)


def _is_beyond(curve: Sequence[CurvePoint], cache_bytes: int) -> bool:
    """Whether no cache serves a part of the largest size: it is many times as large, or two sizes past the cache are
    read equally fast, of which a cache that kept anything would keep a larger part of the smaller."""
    if not curve:
        return False
    return curve[-1].nbytes >= _STREAM_CACHE_MULTIPLE * cache_bytes or _is_past(
        curve, max(cache_bytes, _STREAM_LEAST_BYTES)
    )


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


# A stream as large as the weights may take this share of the memory that is free; larger models are read in part.
_MEMORY_SHARE = 0.1
_LEAST_PASSES = 5


def measure_weights(tensors: Iterable[torch.Tensor | None], machine: Machine, budget_s: float) -> WeightReadRoof | None:
    """Bytes a second of a sum over each of a model's weights on the device, beside a stream cut into the same pieces.

    Many short reads reach less than one long one, wherever they lie (24 of 32 GB/s over the 272 weights of
    SmolLM2-135M): only what the stream's pieces do not lose as well is the weights' own. Where the device captures, a
    pass over all of them is one launch: a fast card ends a read before its host has submitted the next, and both rates
    would be the host's. None where no weight lies on the device. Raises RequestError where a pass cannot be captured.
    """
    weights = _fitting(_storages(tensors, machine.device), machine.available_bytes() * _MEMORY_SHARE)
    if not weights:
        return None
    elements = [part.numel() for part in weights]
    nbytes = sum(part.nbytes for part in weights)
    stream = random_bytes(nbytes, machine.device).view(torch.int64).split(elements)
    seconds = _in_turn(weights, stream, machine, budget_s)
    own, pieces = (_roof(nbytes, each_s, len(weights)) for each_s in seconds)
    return WeightReadRoof(nbytes, own, pieces)


def _fitting(parts: Sequence[torch.Tensor], room_bytes: float) -> list[torch.Tensor]:
    """Every part, or every so-manieth where all of them are more than the room."""
    total = sum(part.nbytes for part in parts)
    return list(parts[:: max(1, math.ceil(total / max(room_bytes, 1.0)))])


def _in_turn(
    weights: Sequence[torch.Tensor], stream: Sequence[torch.Tensor], machine: Machine, budget_s: float
) -> tuple[list[float], list[float]]:
    """Seconds of passes over both, neighbours in time, so that a machine that changes changes for both."""

    def over(parts: Sequence[torch.Tensor]) -> None:
        for part in parts:
            part.sum()

    passes: list[Callable[[], object]] = [partial(over, weights), partial(over, stream)]
    for each in passes:
        each()
    if machine.captures:
        passes = [record(each, machine) for each in passes]
    read_own, read_stream = passes
    own: list[float] = []
    pieces: list[float] = []
    deadline_s = machine.now_s() + budget_s
    while len(own) < _LEAST_PASSES or machine.now_s() < deadline_s:
        own += time_calls(read_own, machine.clock, 1)
        pieces += time_calls(read_stream, machine.clock, 1)
    return own, pieces


def _roof(nbytes: int, seconds: Sequence[float], parts: int) -> Roof:
    return roof_of(nbytes, seconds, f"sum of each of {parts} parts, {nbytes >> 20} MiB")


def _storages(tensors: Iterable[torch.Tensor | None], device: torch.device) -> list[torch.Tensor]:
    """The distinct storages behind `tensors` that lie on the device, each as one flat tensor of int64.

    torch adds those up as fast as memory gives them, as a stream is read; single bytes and bfloat16 (on a CPU) slower:
    17 GB/s where the same bytes give 24.
    """
    found: dict[int, torch.Tensor] = {}
    for inner in (inner for tensor in tensors for inner in inner_tensors(tensor)):
        if inner.device != device:
            continue
        storage = inner.untyped_storage()
        if elements := storage.nbytes() // torch.int64.itemsize:
            flat = torch.empty(0, dtype=torch.int64, device=device)
            found[storage.data_ptr()] = flat.set_(storage, 0, (elements,))
    return list(found.values())
