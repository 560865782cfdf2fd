"""Kernels whose regime is known in advance, and roofs that are measured next to them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from profiler.device.clock import time_calls
from profiler.device.machine import Machine
from profiler.facts.roofs import Ceilings
from profiler.judge.breakdown import TERM_NAMES
from profiler.roofs.bandwidth import disk_fetch

KernelCall = Callable[[], object]

# Calls are repeated for at least this long: longer than the time slice that another process gets on the core.
KERNEL_LOOK_S = 30e-3
_MOST_CALLS = 5
# For a kernel and its parts. The median of two calls would include half the delay of one of them.
_LEAST_CALLS = 3

CHAIN_LENGTH = 2000
_PRODUCT_S = 10e-3
_SHORT_PRODUCT_S = 1e-3
_SHORT_PRODUCTS = 4
# Host time over device time of the host-bound loop: with five times the device time it would still be host-bound.
_HOST_RATIO = 6
# Stream time over product time, in the middle of the mixed regime: another label needs 1.5 times the bytes or 1.25
# times the FLOPs.
_STREAM_RATIO = 1.1
# Weights of the size in a large model (64 MiB in float32), or larger: a cache that holds them, such as the 72 MiB of an
# RTX 4090, serves all rows but one. The products would then take no longer than their launches.
_LEAST_WIDTH = 4096
_ROWS = 16


@dataclass(frozen=True)
class Label:
    """A regime, with its cause if it is kernel-bound."""

    regime: str
    """A `Regime`."""
    cause: str = ""
    """For kernel-bound, the largest term: `kernels below the roof` or `dequantisation`."""

    def __str__(self) -> str:
        return f"{self.regime}, {self.cause}" if self.cause else self.regime


@dataclass(frozen=True)
class Part:
    """An operator of a known kernel: its FLOPs and bytes, and calls that run only this operator."""

    flops: float
    nbytes: float
    call: KernelCall | None = None
    """None if the operator is almost entirely dispatch."""
    hollow: KernelCall | None = None
    """The same calls on tiny tensors, which measure dispatch."""
    convert: KernelCall | None = None
    """The conversion between formats within the operator."""


@dataclass(frozen=True)
class KnownKernel:
    """A call whose label is known in advance."""

    name: str
    label: Label
    call: KernelCall
    hollow: KernelCall
    """The same calls on tiny tensors, which measure dispatch."""
    parts: tuple[Part, ...]
    fetch: KernelCall | None = None
    """The transfer over a link within the call."""


@dataclass(frozen=True)
class RoofsNow:
    """Roofs that were measured at one moment."""

    memory_bytes_per_s: float
    compute_flops_per_s: float


class KernelBench:
    """Buffers that all kernels share, and measurements of the roofs on them."""

    def __init__(self, machine: Machine, ceilings: Ceilings, stack: ExitStack) -> None:
        self.machine = machine
        device = machine.device
        cache_bytes = machine.info.last_level_cache_bytes
        # The least multiple of 1024 whose square in float32 has the size of two caches.
        self.width = max(_LEAST_WIDTH, 1024 * math.ceil(math.sqrt(2 * cache_bytes / 4) / 1024))
        """Rows and columns of a weight matrix in float32 that no cache holds."""
        elements = self.width**2
        self.data = torch.rand(max(ceilings.stream_bytes // 4, elements), device=device)
        """Larger than every cache."""
        self.weights = self.data[: self.data.numel() // elements * elements].view(-1, self.width, self.width)
        self.rows = torch.randn(_ROWS, self.width, device=device)
        self.tiny = torch.zeros(8, 8, device=device)
        self.one = torch.zeros(1, device=device)
        self.flops_per_s = ceilings.compute_flops_per_s("float32")
        self.left, self.right = self.squares(_PRODUCT_S)
        self.fetch = stack.enter_context(disk_fetch(4 * _LEAST_WIDTH**2, machine))

    def squares(self, seconds: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two random square matrices whose product takes about `seconds`."""
        side = 1 << max(5, round(math.log2(seconds * self.flops_per_s / 2) / 3))
        left, right = (torch.randn(side, side, device=self.machine.device) for _ in range(2))
        return left, right

    def look(self) -> RoofsNow:
        """Measure the roofs: the faster of a stream and a matrix-vector product, and a product of squares."""
        read_bytes_per_s = 4 * self.data.numel() / self.seconds(self.data.sum)
        gemv_bytes_per_s = 4 * self.weights.numel() / self.seconds(self.one_row)
        flops_per_s = 2.0 * len(self.left) ** 3 / self.seconds(self.product)
        return RoofsNow(max(read_bytes_per_s, gemv_bytes_per_s), flops_per_s)

    def one_row(self) -> None:
        for weight in self.weights:
            F.linear(self.rows[:1], weight)

    def product(self) -> torch.Tensor:
        return F.linear(self.left, self.right)

    def tiny_product(self) -> torch.Tensor:
        """Return a product that is almost entirely dispatch."""
        return F.linear(self.tiny, self.tiny)

    def seconds(self, call: KernelCall, least: int = 1) -> float:
        """Return the median seconds of a few calls in a row, at least `least`."""
        times_s: list[float] = []
        while len(times_s) < least or (len(times_s) < _MOST_CALLS and sum(times_s) < KERNEL_LOOK_S):
            times_s += time_calls(call, self.machine.clock, 1)
        return statistics.median(times_s)

    def times_s(self, calls: Iterable[KernelCall | None]) -> list[float]:
        """Return the seconds of each call; 0 for None."""
        return [self.seconds(call, _LEAST_CALLS) if call else 0.0 for call in calls]


def repeat(times: int, *calls: KernelCall) -> KernelCall:
    """Return a call that makes `calls` one after the other, `times` over."""

    def run() -> None:
        for _ in range(times):
            for call in calls:
                call()

    return run


def known_kernels(bench: KernelBench) -> Iterator[KnownKernel]:
    """Yield kernels of every label and cause. Each is built when it is needed, by the roofs of that moment."""
    data, tiny, one, device = bench.data, bench.tiny, bench.one, bench.machine.device
    wide = torch.randn(2 * len(bench.left), len(bench.left), device=device)
    wide_bytes = 4.0 * (bench.left.numel() + wide.numel() + len(bench.left) * len(wide))
    product = partial(F.linear, bench.left, wide)
    yield _single(
        "a large matrix product",
        Label("compute-bound"),
        Part(2.0 * bench.left.numel() * len(wide), wide_bytes, product, bench.tiny_product),
    )
    stream = Part(0.0, 4.0 * data.numel(), data.sum, one.sum)
    yield _single("a stream past every cache", Label("memory-bound"), stream)
    yield _product_and_stream(bench)

    chain = repeat(CHAIN_LENGTH, partial(one.add_, 1))
    additions = Part(1.0 * CHAIN_LENGTH, 8.0 * CHAIN_LENGTH)
    yield KnownKernel("a chain of one-element additions", Label("overhead-bound"), chain, chain, (additions,))
    yield _host_loop(bench)

    # Reads its weights once per row, where once in total is enough.
    row_by_row = repeat(1, *(partial(F.linear, row, bench.weights[0]) for row in bench.rows))
    yield _single(
        f"a product of {_ROWS} rows, row by row",
        Label("kernel-bound", TERM_NAMES["kernel_s"]),
        Part(
            2.0 * _ROWS * bench.width**2,
            4.0 * bench.width**2,
            row_by_row,
            repeat(_ROWS, partial(F.linear, tiny[0], tiny)),
        ),
    )
    yield _dequantised(bench)

    row, square = bench.rows[:1, :_LEAST_WIDTH], (_LEAST_WIDTH, _LEAST_WIDTH)
    on_device = data[: _LEAST_WIDTH**2].view(square)
    of_one_row = Part(2.0 * _LEAST_WIDTH**2, on_device.nbytes, partial(F.linear, row, on_device), bench.tiny_product)
    yield KnownKernel(
        "a product of one row, its weights on the disk",
        Label("link-bound"),
        lambda: F.linear(row, bench.fetch().view(torch.float32).view(square)),
        bench.tiny_product,
        (of_one_row,),
        bench.fetch,
    )


def _single(name: str, label: Label, part: Part) -> KnownKernel:
    """Return a kernel that is one operator."""
    assert part.call is not None
    assert part.hollow is not None
    return KnownKernel(name, label, part.call, part.hollow, (part,))


def _product_and_stream(bench: KernelBench) -> KnownKernel:
    """Return a kernel of a product and a stream that takes about as long."""
    roofs = bench.look()
    flops = 2.0 * len(bench.left) ** 3
    elements = int(_STREAM_RATIO * flops / roofs.compute_flops_per_s * roofs.memory_bytes_per_s / 4)
    streams = math.ceil(elements / bench.data.numel())
    data = bench.data[: elements // streams]
    stream, hollow_stream = repeat(streams, data.sum), repeat(streams, bench.one.sum)
    return KnownKernel(
        "a product and a stream, nearly equally long",
        Label("mixed"),
        repeat(1, bench.product, stream),
        repeat(1, bench.tiny_product, hollow_stream),
        (
            Part(flops, 12.0 * bench.left.numel(), bench.product, bench.tiny_product),
            Part(0.0, 4.0 * data.numel() * streams, stream, hollow_stream),
        ),
    )


def _host_loop(bench: KernelBench) -> KnownKernel:
    """Return a loop of products that keeps the host busy for longer than the device."""
    left, right = bench.squares(_SHORT_PRODUCT_S)
    short = partial(F.linear, left, right)
    products, hollow_products = repeat(_SHORT_PRODUCTS, short), repeat(_SHORT_PRODUCTS, bench.tiny_product)
    addition = partial(bench.one.add_, 1)
    products_s = bench.seconds(products)
    # The minimum: if other processes delay the host now, a larger time would give the loop too little work.
    addition_s = min(time_calls(repeat(CHAIN_LENGTH, addition), bench.machine.clock, _MOST_CALLS)) / CHAIN_LENGTH
    additions = repeat(math.ceil(_HOST_RATIO * products_s / _SHORT_PRODUCTS / addition_s), addition)
    flops, nbytes = 2.0 * _SHORT_PRODUCTS * len(left) ** 3, 12.0 * _SHORT_PRODUCTS * left.numel()
    return KnownKernel(
        "short products between a host's own work",
        Label("overhead-bound"),
        repeat(_SHORT_PRODUCTS, short, additions),
        repeat(_SHORT_PRODUCTS, bench.tiny_product, additions),
        (Part(flops, nbytes, products, hollow_products),),
    )


def _dequantised(bench: KernelBench) -> KnownKernel:
    """Return a matrix-vector product whose int8 weights are converted to float32 and scaled by row in each call."""
    width = bench.width
    packed = torch.randint(-127, 128, (width, width), device=bench.machine.device, dtype=torch.int8)
    scales = torch.rand(width, 1, device=bench.machine.device)
    tiny_packed = packed[:8, :8].contiguous()

    def dense() -> torch.Tensor:
        return packed.float().mul_(scales)

    return _single(
        "a product of int8 weights, unpacked before it",
        Label("kernel-bound", TERM_NAMES["dequantise_s"]),
        Part(
            2.0 * width**2,
            1.0 * packed.numel() + 4.0 * width,
            lambda: F.linear(bench.rows[:1], dense()),
            lambda: F.linear(bench.tiny, tiny_packed.float().mul_(scales[:8])),
            dense,
        ),
    )
