"""Bandwidth: reads of large buffers and of the model's own weights, and the links from host, disk or another GPU."""

import math
import mmap
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from profiler import effort
from profiler.device.clock import time_calls, waited_s
from profiler.device.machine import Machine
from profiler.device.memory import inner_tensors, page_faults
from profiler.facts.ceilings import AGREE, COPY, PINNED, READ, TRIAD, Ceiling, Ceilings, CurvePoint, WeightReadCeiling
from profiler.roofs.sampler import attempt, ceiling_of, clocked, is_known, random_data, record, sample, sample_on_device

# Four times all last-level caches, as BabelStream and STREAM require, so that they cannot serve the stream.
_STREAM_CACHE_MULTIPLE = 4
# From this size on two sizes must agree. The largest cache that a device does not report is MI300X's, of 256 MiB.
_STREAM_LEAST_BYTES = 256 << 20
_STREAM_MEMORY_SHARE = 0.1
_GPU_AGREE = 0.01
_CURVE_SMALLEST = 1 << 20
_CURVE_DOUBLINGS = 8
# Share of the curve's time for each of its first ten sizes; larger ones, tried for a plateau, have the rest.
_POINT_SHARE = 1 / 18
# Shares of the time of all streams.
_CURVE_SHARE, _READ_SHARE, _COPY_SHARE = 0.4, 0.3, 0.15
# CUDA's launch queue has about a thousand entries; beyond it the device would be timed instead of the host.
_LAUNCHES = 500
# As large as what a prefill passes from one kernel to the next. Pages of a 64 MiB buffer, which no near cache serves,
# cost less beyond filling them: 0.6 µs on a Xeon, and 1.1 with 8 MiB. In steps with 350,000 faults each cost 1.2 µs.
_FRESH_BYTES = 8 << 20
_FRESH_BUFFERS = 16


def measure_page_fault_s(machine: Machine) -> float:
    """Return the seconds per page fault, all threads busy: filling a fresh buffer, less filling one that is there."""
    resident = torch.zeros(_FRESH_BYTES, dtype=torch.uint8)
    costs = []
    for _ in range(_FRESH_BUFFERS):
        faults_before = page_faults()
        [fresh_s] = time_calls(_fill_fresh, machine.clock, 1)
        pages = page_faults() - faults_before
        [resident_s] = time_calls(partial(resident.fill_, 1), machine.clock, 1)
        if pages:
            costs.append((fresh_s - resident_s) / pages)
    return max(0.0, statistics.median(costs)) if costs else 0.0


def _fill_fresh() -> None:
    with mmap.mmap(-1, _FRESH_BYTES) as pages:
        fresh = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
        del fresh  # a map that is still in use cannot be closed


def past_reported_cache(machine: Machine) -> int:
    """The bytes from which on the reported cache serves no stream."""
    return _STREAM_CACHE_MULTIPLE * machine.info.last_level_cache_bytes or _STREAM_LEAST_BYTES


def measure_streams(machine: Machine, budget_s: float, most_bytes: float = math.inf) -> Ceilings:
    """Measure in `budget_s` the ceilings that depend on no dtype; `missing` has those that fail. Raises DeviceError."""
    missing: dict[str, str] = {}
    curve, data = _curve(machine, _CURVE_SHARE * budget_s, most_bytes, missing)
    stream_bytes = curve[-1].nbytes if curve else _STREAM_LEAST_BYTES
    memory = _streams(machine, data, stream_bytes, budget_s, missing)
    # No cache serves the largest size: it is many times as large, or two sizes beyond the cache agree.
    cache_bytes = machine.info.last_level_cache_bytes
    is_larger = bool(curve) and curve[-1].nbytes >= _STREAM_CACHE_MULTIPLE * cache_bytes
    is_beyond = is_larger or _is_past(curve, max(cache_bytes, _STREAM_LEAST_BYTES))
    launch: dict[str, float] = {}
    with attempt("launches", machine, missing):
        launch = _launch(machine)
    return Ceilings(
        compute={},
        memory=memory,
        stream_bytes=stream_bytes,
        beyond_cache=is_beyond,
        curve=curve,
        launch=launch,
        measured_at_unix_s=machine.unix_s(),
        missing=missing,
    )


def measure_read(machine: Machine, nbytes: int, budget_s: float) -> Ceiling:
    """Return the bytes/s of repeatedly reading a buffer of `nbytes`."""
    return _read(machine, random_data(nbytes, machine.device), budget_s)


def _read(machine: Machine, data: torch.Tensor, budget_s: float) -> Ceiling:
    return ceiling_of(data.nbytes, sample_on_device(data.sum, machine, budget_s), f"sum of {data.nbytes >> 20} MiB")


def _streams(
    machine: Machine, data: torch.Tensor | None, nbytes: int, budget_s: float, missing: dict[str, str]
) -> dict[str, Ceiling]:
    """Read-dominant stream, copy and triad over `nbytes`, of `data` if given. As in STREAM, a write is counted once."""
    ceilings: dict[str, Ceiling] = {}
    with attempt(f"{READ}, {COPY} and {TRIAD}", machine, missing):
        data = random_data(nbytes, machine.device) if data is None else data[: nbytes // 4]
        source, target = data.chunk(2)
        x, y, z = data[: 3 * (data.numel() // 3)].chunk(3)

        def probe(moved_bytes: int, call: Callable[[], object], method: str) -> Ceiling:
            return ceiling_of(moved_bytes, sample_on_device(call, machine, _COPY_SHARE * budget_s), method)

        probes = {
            READ: lambda: _read(machine, data, _READ_SHARE * budget_s),
            COPY: lambda: probe(2 * source.nbytes, lambda: target.copy_(source), "1 read, 1 write"),
            TRIAD: lambda: probe(3 * x.nbytes, lambda: torch.add(x, y, alpha=3.0, out=z), "2 reads, 1 write"),
        }
        for name, run in probes.items():
            with attempt(name, machine, missing):
                ceilings[name] = clocked(run, machine)
    return ceilings


def _curve(
    machine: Machine, budget_s: float, most_bytes: float, missing: dict[str, str]
) -> tuple[tuple[CurvePoint, ...], torch.Tensor | None]:
    """Read bandwidth of buffers from 1 MiB on, each twice the previous one, and the last buffer, if memory had room.

    One more size nearly fills the reported cache, which may serve weights that the next power of two exceeds. A device
    may have a second cache besides the one it reports, or share one. Sizes therefore grow until the time per byte is
    constant, up to a tenth of the memory, `most_bytes` and the time limit.
    """
    cache_bytes = machine.info.last_level_cache_bytes
    past_bytes = max(_STREAM_CACHE_MULTIPLE * cache_bytes, _STREAM_LEAST_BYTES)
    # What a read writes needs some of the cache, too.
    sizes = {cache_bytes - _CURVE_SMALLEST, *(_STREAM_LEAST_BYTES >> n for n in range(_CURVE_DOUBLINGS + 1))}
    deadline_s, points = machine.now_s() + budget_s, list[CurvePoint]()
    data = None
    with attempt("reads of several sizes", machine, missing):
        free_bytes = min(most_bytes, machine.available_bytes() * _STREAM_MEMORY_SHARE)
        data = random_data(int(min(_STREAM_LEAST_BYTES, max(free_bytes, _CURVE_SMALLEST))), machine.device)
        for nbytes in sorted(size for size in sizes if _CURVE_SMALLEST <= size <= data.nbytes):
            with attempt("reads of some sizes", machine, missing):
                points.append(_point(machine, data[: nbytes // 4], budget_s))
        nbytes = 2 * _STREAM_LEAST_BYTES
        # A GPU's reads repeat within a few per mille. Each has a fixed cost: on an H100, 8 of the 181 µs of 512 MiB.
        tolerance = _GPU_AGREE if machine.is_cuda else AGREE
        while nbytes <= free_bytes and not _is_past(points, past_bytes, tolerance):
            start_s = machine.now_s()
            data = None  # frees it before the next one is made
            data = random_data(nbytes, machine.device)
            points.append(_point(machine, data, budget_s))
            nbytes *= 2
            now_s = machine.now_s()
            if now_s + 2 * (now_s - start_s) > deadline_s:
                break
    return tuple(points), data


def _point(machine: Machine, data: torch.Tensor, budget_s: float) -> CurvePoint:
    seconds = sample_on_device(data.sum, machine, _POINT_SHARE * budget_s)
    return CurvePoint(data.nbytes, data.nbytes / statistics.median(seconds))


def _is_past(points: Sequence[CurvePoint], past_bytes: int, tolerance: float = AGREE) -> bool:
    if len(points) < 2:
        return False
    smaller, larger = points[-2:]
    return smaller.nbytes >= past_bytes and abs(larger.bytes_per_s / smaller.bytes_per_s - 1) <= tolerance


def _launch(machine: Machine) -> dict[str, float]:
    """Seconds per tiny kernel: to submit one and, on CUDA, to run one while a graph replays them back to back."""
    x = torch.zeros(1, device=machine.device)

    def submit() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1)

    x.add_(1)
    machine.clock.synchronize()
    seconds = {"submit_s": waited_s(submit, lambda: None, now=machine.now_s) / _LAUNCHES}
    machine.clock.synchronize()
    if machine.captures:
        seconds["device_s"] = statistics.median(sample(machine.capture(submit), machine, 0.1)) / _LAUNCHES
    return seconds


def measure_weights(
    tensors: Iterable[torch.Tensor | None], machine: Machine, budget_s: float
) -> WeightReadCeiling | None:
    """Return the bytes/s of summing each of a model's weights on the device, and of a stream cut into the same pieces.

    Many short reads are slower than a long one wherever they are: 24 of 32 GB/s over the 272 weights of SmolLM2-135M.
    Where the device captures, a pass is one launch: a fast GPU would wait for its host. None if no weight is on the
    device. Raises RequestError if a pass cannot be captured.
    """
    parts = _storages(tensors, machine.device)
    room_bytes = max(machine.available_bytes() * _STREAM_MEMORY_SHARE, 1.0)  # larger models are read in part
    weights = parts[:: max(1, math.ceil(sum(part.nbytes for part in parts) / room_bytes))]
    if not weights:
        return None
    nbytes = sum(part.nbytes for part in weights)
    stream = random_data(nbytes, machine.device).view(torch.int64).split([part.numel() for part in weights])
    method = f"sum of each of {len(weights)} parts, {nbytes >> 20} MiB"
    weights_s, stream_s = _interleaved_s(weights, stream, machine, budget_s)
    return WeightReadCeiling(nbytes, ceiling_of(nbytes, weights_s, method), ceiling_of(nbytes, stream_s, method))


def _interleaved_s(
    weights: Sequence[torch.Tensor], stream: Sequence[torch.Tensor], machine: Machine, budget_s: float
) -> tuple[list[float], list[float]]:
    """Seconds of alternating passes over both, so that a change in the machine's speed affects both."""

    def read_parts(parts: Sequence[torch.Tensor]) -> None:
        for part in parts:
            part.sum()

    passes: list[Callable[[], object]] = [partial(read_parts, weights), partial(read_parts, stream)]
    for read in passes:
        read()
    if machine.captures:
        passes = [record(read, machine) for read in passes]
    weights_s, stream_s = list[float](), list[float]()
    deadline_s = machine.now_s() + budget_s
    while len(weights_s) < 2 or (machine.now_s() < deadline_s and not (is_known(weights_s) and is_known(stream_s))):
        for read, seconds in zip(passes, (weights_s, stream_s), strict=True):
            seconds += time_calls(read, machine.clock, 1)
    return weights_s, stream_s


def _storages(tensors: Iterable[torch.Tensor | None], device: torch.device) -> list[torch.Tensor]:
    """The distinct storages on the device as flat tensors of int64, which torch sums faster than bytes or bfloat16."""
    flat_by_address: dict[int, torch.Tensor] = {}
    for inner in (inner for tensor in tensors for inner in inner_tensors(tensor)):
        if inner.device != device:
            continue
        storage = inner.untyped_storage()
        if elements := storage.nbytes() // torch.int64.itemsize:
            flat = torch.empty(0, dtype=torch.int64, device=device)
            flat_by_address[storage.data_ptr()] = flat.set_(storage, 0, (elements,))
    return list(flat_by_address.values())


_LINK_BYTES = 256 << 20


def measure_links(
    names: Sequence[str], machine: Machine, budget_s: float | None = None
) -> tuple[dict[str, Ceiling], dict[str, str]]:
    """Measure the bytes/s at which weights reach the device from the `host`, the `disk` or another GPU (`cuda:N`).

    `budget_s` is for each. Returns the links by name, and why others could not be measured. A GPU's `host` also gives
    pinned memory, which accelerate's hooks do not use. Raises DeviceError.
    """
    budget_s = effort.STANDARD.ceiling_s if budget_s is None else budget_s
    links, missing = dict[str, Ceiling](), dict[str, str]()
    for name in (*names, *((PINNED,) if "host" in names and machine.is_cuda else ())):
        with attempt(f"the link from {name}", machine, missing):
            links[name] = _link(name, machine, budget_s)
    return links, missing


def _link(name: str, machine: Machine, budget_s: float) -> Ceiling:
    if name == "disk":
        with disk_fetch(_LINK_BYTES, machine) as fetch:
            seconds = sample(fetch, machine, budget_s)
        return ceiling_of(_LINK_BYTES, seconds, "256 MiB file, not in the page cache, mapped and copied")
    source = random_data(_LINK_BYTES, torch.device("cpu" if name in ("host", PINNED) else name))
    if name == "host":  # ordinary memory, as accelerate 1.15 never pins it (`AlignDevicesHook.pre_forward`)
        seconds = sample(lambda: source.to(machine.device, copy=True), machine, budget_s)
        return ceiling_of(_LINK_BYTES, seconds, "256 MiB, pageable host memory to device")
    # Memory that the GPU reads directly: the host's pinned one, or another GPU's (NVLink or PCIe).
    direct = source.pin_memory() if name == PINNED else source
    target = torch.empty_like(direct, device=machine.device)
    seconds = sample(lambda: target.copy_(direct, non_blocking=True), machine, budget_s)
    ends = "pinned host memory to device" if name == PINNED else f"{name} to {machine.device}"
    return ceiling_of(_LINK_BYTES, seconds, f"256 MiB, {ends}")


@contextmanager
def disk_fetch(nbytes: int, machine: Machine) -> Iterator[Callable[[], torch.Tensor]]:
    """Yield a function that reads `nbytes` from a file, not from the page cache, as accelerate reads weights."""
    with tempfile.TemporaryFile(prefix="roofscope-link-") as file:
        np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8).tofile(file)
        file.flush()
        os.fsync(file.fileno())

        def read() -> torch.Tensor:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return torch.tensor(np.memmap(file, dtype=np.uint8, mode="r")).to(machine.device)

        yield read
