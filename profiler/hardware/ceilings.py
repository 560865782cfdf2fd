"""The roofs of a device, measured in seconds: compute by dtype, memory, and the link to the host."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from profiler.clock import NOTCH, Clock, clock_for, time_calls
from profiler.hardware.device import Device
from profiler.hardware.telemetry import Source, Watch, source_for
from profiler.memory import available_bytes, page_faults

# 4x the last-level cache, as BabelStream and STREAM ask for, so that the cache cannot serve the stream.
_STREAM_CACHE_MULTIPLE = 4
_STREAM_LEAST_BYTES = 256 << 20
_STREAM_MOST_BYTES = 2 << 30
_STREAM_MEMORY_SHARE = 0.1

_GEMM_SMALLEST = 256
_GEMM_LARGEST = 8192
# A call this long keeps every unit busy and makes its start and end negligible.
_GEMM_ENOUGH_S = {"cpu": 50e-3, "cuda": 5e-3}
TFLOAT32 = "tfloat32"
_GEMV = "gemv"
_GEMV_SHAPE = (4096, 4096)

_CURVE_SMALLEST = 1 << 20
_RESIDENT_GAIN = 1.25
# CUDA's launch queue holds about a thousand; past that the device would be timed instead of the host.
_LAUNCHES = 500

_STAGE_BUDGET_S = 1.5
_LEAST_SAMPLES = 5
_MOST_SAMPLES = 100
_STEADY_RATIO = 1.05
_LEAST_SAMPLE_S = 1e-3
_CLOCK_LOOKS_S = 0.1
# A short look at what was kept; faster than this it has been outgrown.
_CHECK_S = 0.3
_CHECK_BYTES = 256 << 20
# Larger than what malloc ever takes from its heap (32 MiB, glibc's DEFAULT_MMAP_THRESHOLD_MAX): fresh at each call.
_FRESH_BYTES = 64 << 20
_FRESH_BUFFERS = 5
_OUTGROWN = 1.05


@dataclass(frozen=True)
class Roof:
    """One measured roof, in units a second."""

    per_s: float
    """The median of the samples."""
    low_per_s: float
    high_per_s: float
    """Quartiles of the samples."""
    samples: int
    method: str
    clock_hz: float | None = None
    """The device's clock while it was measured (median), where the device says."""

    @property
    def half_width(self) -> float:
        """How far the median may be off, as a share of it (the notch of a box plot, see `clock.timing_of`)."""
        return NOTCH * (self.high_per_s - self.low_per_s) / self.per_s / math.sqrt(self.samples)


@dataclass(frozen=True)
class CurvePoint:
    """The bandwidth of reading one buffer of this size again and again."""

    nbytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class Ceilings:
    """What this device does at best, as measured in this run."""

    compute: dict[str, Roof]
    """FLOP/s of a large matrix product, by dtype name."""
    memory: dict[str, Roof]
    """Bytes/s by kind of stream: read, copy, triad, and the matrix-vector product of the model's dtype."""
    stream_bytes: int
    """Size of the buffers that were streamed."""
    beyond_cache: bool
    """Whether the buffers were at least four times the last-level cache."""
    curve: tuple[CurvePoint, ...] = ()
    """Read bandwidth over buffer sizes: caches show as steps."""
    launch: dict[str, float] = field(default_factory=dict)
    """Seconds that the host needs to submit one tiny kernel, and that the device needs to run it (by graph replay)."""
    page_fault_s: float = 0.0
    """Seconds to touch a page that the system has just given (CPU); 0 where it was not measured."""
    links: dict[str, Roof] = field(default_factory=dict)
    """Bytes/s from the `host` or the `disk` to the device; measured only for where weights of this model wait."""
    measured_s: float = 0.0
    """Seconds that measuring took."""
    measured_at_unix_s: float = 0.0

    @property
    def memory_bytes_per_s(self) -> float:
        """The memory roof: the fastest stream that was seen, past every cache."""
        return max(roof.per_s for roof in self.memory.values())

    @property
    def memory_half_width(self) -> float:
        """How far the memory roof may be off, as a share of it."""
        return max(self.memory.values(), key=lambda roof: roof.per_s).half_width

    def memory_bytes_per_s_for(self, working_set_bytes: float) -> float:
        """The roof of a working set: what its size reaches when it is read again and again, or the memory roof.

        A model that a cache holds whole is not bound by memory; the nearest larger size of the curve decides.
        """
        larger = [point.bytes_per_s for point in self.curve if point.nbytes >= working_set_bytes]
        return max(self.memory_bytes_per_s, larger[0] if larger else 0.0)

    def cache_resident(self, working_set_bytes: float) -> bool:
        """Whether a working set is served by a cache: its size is read clearly faster than memory is."""
        return self.memory_bytes_per_s_for(working_set_bytes) > _RESIDENT_GAIN * self.memory_bytes_per_s

    def only(self, dtypes: Sequence[str], model_dtype: str) -> Ceilings:
        """The roofs of these dtypes alone, for a model whose weights are of `model_dtype`."""
        streams = {name: roof for name, roof in self.memory.items() if not name.startswith(_GEMV)}
        product = self.memory.get(f"{_GEMV} {model_dtype}")
        return replace(
            self,
            compute={name: self.compute[name] for name in dtypes},
            memory={**streams, **({_GEMV: product} if product else {})},
        )

    def compute_flops_per_s(self, dtype: str) -> float:
        """The compute roof for a dtype; an unmeasured one falls back to the fastest measured."""
        return self._compute_roof(dtype).per_s

    def compute_half_width(self, dtype: str) -> float:
        """How far that roof may be off, as a share of it."""
        return self._compute_roof(dtype).half_width

    def _compute_roof(self, dtype: str) -> Roof:
        return self.compute.get(dtype) or max(self.compute.values(), key=lambda roof: roof.per_s)


def measure(
    device: torch.device,
    info: Device,
    dtypes: Sequence[str],
    *,
    model_dtype: str,
    clock: Clock | None = None,
    stage_budget_s: float = _STAGE_BUDGET_S,
    known: Ceilings | None = None,
    source: Source | None = None,
) -> Ceilings:
    """Measure the roofs of `device`: GEMM for each of `dtypes`, streams, and a matrix-vector product of `model_dtype`.

    What `known` holds already is kept, whatever its dtypes, unless a short look shows that the device is faster than
    that: then it was measured in a busy minute. `source` tells the clock during each probe. Data are random, because a
    product of zeros draws less power and runs faster than any real one (Horace He, "Strangely, Matrix Multiplications
    on GPUs Run Faster When Given 'Predictable' Data!", 2024).
    """
    clock = clock or clock_for(device)
    start = time.perf_counter()
    source = source or source_for(device)
    if known is not None and _outgrown(known, device, clock):
        known = None
    roofs = known or _measure_streams(device, info, clock, stage_budget_s, source)
    if device.type == "cpu" and not roofs.page_fault_s:
        roofs = replace(roofs, page_fault_s=_page_fault_s(clock))
    memory, compute = dict(roofs.memory), dict(roofs.compute)
    if model_dtype != "int8" and f"{_GEMV} {model_dtype}" not in memory:
        probe = partial(_gemv, device, model_dtype, roofs.stream_bytes, clock, stage_budget_s)
        memory[f"{_GEMV} {model_dtype}"] = _clocked(probe, source)
    for dtype in dtypes:
        if dtype not in compute:
            compute[dtype] = _clocked(partial(_gemm, device, dtype, clock, stage_budget_s), source)
    measured_s = roofs.measured_s + time.perf_counter() - start
    return replace(roofs, compute=compute, memory=memory, measured_s=measured_s)


def _page_fault_s(clock: Clock) -> float:
    """Seconds a page that filling a fresh buffer takes beyond filling it again, all threads at work."""
    costs = []
    for _ in range(_FRESH_BUFFERS):
        fresh = torch.empty(_FRESH_BYTES, dtype=torch.uint8)
        before = page_faults()
        first_s, again_s = time_calls(partial(fresh.fill_, 1), clock, 2)
        if pages := page_faults() - before:
            costs.append((first_s - again_s) / pages)
    return max(0.0, statistics.median(costs)) if costs else 0.0


def _clocked(probe: Callable[[], Roof], source: Source) -> Roof:
    """A probe's roof with the clock that the device reported while it ran."""
    with Watch(source, interval_s=_CLOCK_LOOKS_S) as watch:
        roof = probe()
    clocks = [reading.clock_hz for reading in watch.readings if reading.clock_hz is not None]
    return replace(roof, clock_hz=statistics.median(clocks) if clocks else None)


def _outgrown(known: Ceilings, device: torch.device, clock: Clock) -> bool:
    """Whether the device is clearly faster now than the roofs that were kept: they are no roofs then."""
    elements = min(known.stream_bytes, _CHECK_BYTES) // 4
    data = torch.rand(elements, device=device)
    read = 4 * elements / statistics.median(sample(data.sum, clock, _CHECK_S))
    if read > _OUTGROWN * known.memory_bytes_per_s:
        return True
    for dtype, roof in known.compute.items():
        if dtype == "float32":
            size = int(roof.method.split("x")[0])
            product = _square_product(device, dtype, size)
            return 2.0 * size**3 / statistics.median(sample(product, clock, _CHECK_S)) > _OUTGROWN * roof.per_s
    return False


def _measure_streams(
    device: torch.device, info: Device, clock: Clock, stage_budget_s: float, source: Source
) -> Ceilings:
    """The roofs that no dtype decides."""
    wanted = max(_STREAM_CACHE_MULTIPLE * info.last_level_cache_bytes, _STREAM_LEAST_BYTES)
    stream_bytes = min(wanted, _STREAM_MOST_BYTES, int(available_bytes(device) * _STREAM_MEMORY_SHARE))
    memory = _streams(device, stream_bytes, clock, stage_budget_s, source)
    return Ceilings(
        compute={},
        memory=memory,
        stream_bytes=stream_bytes,
        beyond_cache=stream_bytes >= _STREAM_CACHE_MULTIPLE * info.last_level_cache_bytes,
        curve=_curve(device, stream_bytes, clock, stage_budget_s),
        launch=_launch(device, clock),
        measured_at_unix_s=time.time(),
    )


def measure_links(
    names: Sequence[str], device: torch.device, clock: Clock | None = None, budget_s: float = _STAGE_BUDGET_S
) -> dict[str, Roof]:
    """Bytes/s from the `host`'s memory, the `disk` or another card (`cuda:N`) to the device."""
    clock = clock or clock_for(device)
    return {name: _LINKS.get(name, partial(_peer_link, name))(device, clock, budget_s) for name in names}


def links_of(device: torch.device) -> list[str]:
    """The links of a device: the host and every other card for CUDA; a CPU has none but its disk."""
    if device.type != "cuda":
        return []
    own = device.index or 0
    return ["host", *(f"cuda:{index}" for index in range(torch.cuda.device_count()) if index != own)]


def sample(call: Callable[[], object], clock: Clock, budget_s: float) -> list[float]:
    """Seconds a call: warmed up until three calls in a row agree, then sampled until `budget_s` is spent.

    Calls shorter than a millisecond are timed in groups, so that the clock's resolution does not matter.
    """
    deadline = time.perf_counter() + budget_s
    recent = time_calls(call, clock, 3)
    while max(recent) > _STEADY_RATIO * min(recent) and time.perf_counter() < deadline - budget_s / 2:
        recent = [*recent[1:], *time_calls(call, clock, 1)]
    group = max(1, int(_LEAST_SAMPLE_S / max(min(recent), 1e-9)))
    samples: list[float] = []
    while len(samples) < _LEAST_SAMPLES or time.perf_counter() < deadline:
        samples.append(sum(time_calls(call, clock, group)) / group)
        if len(samples) >= _MOST_SAMPLES or (len(samples) >= 2 and time.perf_counter() > deadline + budget_s):
            break
    return samples


def _roof(work: float, seconds: Sequence[float], method: str) -> Roof:
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return Roof(work / statistics.median(seconds), work / quartiles[2], work / quartiles[0], len(seconds), method)


def _streams(device: torch.device, nbytes: int, clock: Clock, budget_s: float, source: Source) -> dict[str, Roof]:
    """Read-dominant stream, copy and triad. Bytes by STREAM's convention (a write is counted once)."""
    elements = nbytes // 4
    a = torch.rand(elements, device=device)

    def probe(nbytes: int, call: Callable[[], object], budget_s: float, method: str) -> Roof:
        return _clocked(lambda: _roof(nbytes, sample(call, clock, budget_s), method), source)

    # Copy and triad share the budget of memory with `a`: three buffers of a third each.
    third = elements // 3
    x, y, z = a[:third], a[third : 2 * third], a[2 * third : 3 * third]
    return {
        "read": probe(nbytes, a.sum, budget_s, f"sum of {nbytes >> 20} MiB"),
        "copy": probe(8 * third, lambda: z.copy_(x), budget_s / 2, "1 read, 1 write"),
        "triad": probe(12 * third, lambda: torch.add(x, y, alpha=3.0, out=z), budget_s / 2, "2 reads, 1 write"),
    }


def _curve(device: torch.device, largest: int, clock: Clock, budget_s: float) -> tuple[CurvePoint, ...]:
    """Read bandwidth of buffers from 1 MiB on, each twice the last."""
    sizes = [_CURVE_SMALLEST << power for power in range(64) if _CURVE_SMALLEST << power <= largest]
    data = torch.rand(largest // 4, device=device)
    points = []
    for size in sizes:
        part = data[: size // 4]
        roof = _roof(size, sample(part.sum, clock, budget_s / max(1, len(sizes))), "read")
        points.append(CurvePoint(size, roof.per_s))
    return tuple(points)


def _launch(device: torch.device, clock: Clock) -> dict[str, float]:
    """Seconds a tiny kernel costs: to submit one, and, on CUDA, to run one when a graph replays them back to back."""
    x = torch.zeros(1, device=device)
    x.add_(1)
    clock.synchronize()
    start = time.perf_counter()
    for _ in range(_LAUNCHES):
        x.add_(1)
    costs = {"submit_s": (time.perf_counter() - start) / _LAUNCHES}
    clock.synchronize()
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_LAUNCHES):
                x.add_(1)
        costs["device_s"] = statistics.median(sample(graph.replay, clock, 0.1)) / _LAUNCHES
    return costs


def _gemv(device: torch.device, dtype: str, nbytes: int, clock: Clock, budget_s: float) -> Roof:
    """Bytes of weights a second that a linear layer of one row reads, over weights that rotate past the cache."""
    outs, ins = _GEMV_SHAPE
    kind = getattr(torch, dtype)
    count = max(3, nbytes // (outs * ins * kind.itemsize))
    weights = [torch.randn(outs, ins, device=device, dtype=kind) for _ in range(count)]
    x = torch.randn(1, ins, device=device, dtype=kind)

    def one_pass() -> None:
        for weight in weights:
            F.linear(x, weight)

    nbytes_pass = count * outs * ins * kind.itemsize
    return _roof(nbytes_pass, sample(one_pass, clock, budget_s), f"{count} of {outs}x{ins}")


def _gemm(device: torch.device, dtype: str, clock: Clock, budget_s: float) -> Roof:
    """FLOP/s of the best of several squares on random data, laid out as a linear layer's: x @ W.T.

    Sizes double until one call takes long enough to saturate the device, or the time is spent.
    """
    enough_s = _GEMM_ENOUGH_S[device.type]
    deadline = time.perf_counter() + budget_s
    best: Roof | None = None
    size = _GEMM_SMALLEST
    while True:
        call = _square_product(device, dtype, size)
        call()
        [once_s] = time_calls(call, clock, 1)
        # The probes on the way up only lead to the sizes that matter; they get a small share of the time.
        worth_sampling = once_s >= enough_s / 8 or size == _GEMM_LARGEST
        if worth_sampling or time.perf_counter() > deadline - budget_s / 2:
            share_s = max(deadline - time.perf_counter(), 0) / 3
            roof = _roof(2.0 * size**3, sample(call, clock, share_s), f"{size}x{size}x{size}")
            best = roof if best is None or roof.per_s > best.per_s else best
        done = once_s >= enough_s or size >= _GEMM_LARGEST
        if best is not None and (done or time.perf_counter() > deadline):
            return best
        size *= 2


def measurable_dtypes(device: torch.device) -> list[str]:
    """The dtypes whose matrix products this device has; those it emulates are measured all the same, and tell."""
    dtypes = ["float32", "bfloat16", "float16", "int8"]
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= (8, 0):
            dtypes.append(TFLOAT32)
        if capability >= (8, 9):
            dtypes.append("float8_e4m3fn")
        if capability < (7, 5):
            dtypes.remove("int8")
    return dtypes


def _square_product(device: torch.device, dtype: str, size: int) -> Callable[[], object]:
    if dtype == TFLOAT32:
        full = _square_product(device, "float32", size)
        return lambda: _with_tf32(full)
    if dtype == "float8_e4m3fn":
        one = torch.ones((), device=device)
        left = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
        right = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()
        return lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    if dtype == "int8":
        a = torch.randint(-127, 127, (size, size), device=device, dtype=torch.int8)
        b = torch.randint(-127, 127, (size, size), device=device, dtype=torch.int8).t()
        return lambda: torch._int_mm(a, b)
    kind = getattr(torch, dtype)
    x = torch.randn(size, size, device=device, dtype=kind)
    weight = torch.randn(size, size, device=device, dtype=kind)
    return lambda: F.linear(x, weight)


def _with_tf32(call: Callable[[], object]) -> object:
    """Run one product in TensorFloat-32; the setting is put back, since the model keeps its own."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return call()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _host_link(device: torch.device, clock: Clock, budget_s: float) -> Roof:
    """Bytes a second from the host's pinned memory to the device."""
    nbytes = 256 << 20
    source = torch.rand(nbytes // 4, pin_memory=device.type == "cuda")
    target = torch.empty(nbytes // 4, device=device)
    seconds = sample(lambda: target.copy_(source, non_blocking=True), clock, budget_s)
    return _roof(nbytes, seconds, "256 MiB, pinned host memory to device")


def _peer_link(peer: str, device: torch.device, clock: Clock, budget_s: float) -> Roof:
    """Bytes a second from another card (NVLink or PCIe)."""
    nbytes = 256 << 20
    source = torch.rand(nbytes // 4, device=peer)
    target = torch.empty(nbytes // 4, device=device)
    seconds = sample(lambda: target.copy_(source, non_blocking=True), clock, budget_s)
    return _roof(nbytes, seconds, f"256 MiB, {peer} to {device}")


def _disk_link(device: torch.device, clock: Clock, budget_s: float) -> Roof:
    """Bytes a second from a file to the device, the way accelerate reads offloaded weights: a copy of a memory map.

    The file leaves the page cache before each read where the system allows it: a model that does not fit in memory
    finds its weights gone from there as well.
    """
    nbytes = 256 << 20
    with tempfile.TemporaryFile(prefix="roofscope-link-") as file:
        np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8).tofile(file)
        file.flush()
        os.fsync(file.fileno())

        def read() -> torch.Tensor:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return torch.tensor(np.memmap(file, dtype=np.uint8, mode="r")).to(device)

        seconds = sample(read, clock, budget_s)
    return _roof(nbytes, seconds, "256 MiB file, not in the page cache, mapped and copied")


_LINKS = {"host": _host_link, "disk": _disk_link}
