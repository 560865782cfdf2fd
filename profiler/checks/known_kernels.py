"""Kernels whose regime is known beforehand, and the roofs that are timed next to them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from profiler.device.clock import time_calls
from profiler.device.machine import Machine
from profiler.facts.roofs import Ceilings
from profiler.judge.breakdown import TERM_NAMES
from profiler.judge.regimes import Regime
from profiler.roofs.links import disk_fetch
from profiler.stats import NOTHING, Timing

KernelCall = Callable[[], object]

# A look is repeated until so much time is spent: longer than the slice of a core that a neighbour is given.
KERNEL_LOOK_S = 30e-3
_MOST_CALLS = 5
# Of a kernel and its parts: the median of two would take half of whatever held up one of them.
_LEAST_CALLS = 3

CHAIN_LENGTH = 2000
_PRODUCT_S = 10e-3
_SHORT_PRODUCT_S = 1e-3
_SHORT_PRODUCTS = 4
# How much longer than its products a host-bound loop keeps the host busy: its device time may be five times as long
# and it is host-bound still.
_HOST_TIMES = 6
# In the middle of what is mixed: a label of one side needs 1.5 times as many bytes, or 1.25 times as many FLOPs.
_STREAM_TIMES = 1.1
# Weights as large as a large model's: 64 MiB in float32.
_WIDTH = 4096
_ROWS = 16


@dataclass(frozen=True)
class Label:
    """What a kernel is called."""

    regime: Regime
    cause: str = ""
    """Of kernel-bound: the term that takes most, `kernels below the roof` or `dequantisation`."""

    def __str__(self) -> str:
        return f"{self.regime}, {self.cause}" if self.cause else self.regime


@dataclass(frozen=True)
class Part:
    """An operator of a known kernel: the work that is asked for, and its calls alone."""

    flops: float
    nbytes: float
    call: KernelCall | None = None
    """None where it is dispatch and next to nothing else."""
    hollow: KernelCall | None = None
    """The kernel's calls with nothing to do: their dispatch."""
    convert: KernelCall | None = None
    """The part that only converts between formats."""


@dataclass(frozen=True)
class KnownKernel:
    """A call whose label is known beforehand."""

    name: str
    label: Label
    call: KernelCall
    hollow: KernelCall
    """The part's calls with nothing to do: their dispatch."""
    parts: tuple[Part, ...]
    fetch: KernelCall | None = None
    """The part that crosses a link."""


@dataclass(frozen=True)
class RoofsNow:
    """The roofs at one moment."""

    memory_bytes_per_s: float
    compute_flops_per_s: float


class KernelBench:
    """Buffers that all kernels share, and the roofs looked at on them."""

    def __init__(self, machine: Machine, ceilings: Ceilings, stack: ExitStack) -> None:
        self.machine = machine
        device = machine.device
        self.data = torch.rand(max(ceilings.stream_bytes // 4, _WIDTH * _WIDTH), device=device)
        """Larger than every cache."""
        self.weights = self.data[: self.data.numel() // _WIDTH**2 * _WIDTH**2].view(-1, _WIDTH, _WIDTH)
        self.rows = torch.randn(_ROWS, _WIDTH, device=device)
        self.tiny = torch.zeros(8, 8, device=device)
        self.one = torch.zeros(1, device=device)
        self.flops_per_s = ceilings.compute_flops_per_s("float32")
        self.left, self.right = self.squares(_PRODUCT_S)
        self.fetch = stack.enter_context(disk_fetch(_WIDTH * _WIDTH * 4, machine))

    def squares(self, seconds: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Two random squares whose product takes about so long here."""
        side = 1 << max(5, round(math.log2(seconds * self.flops_per_s / 2) / 3))
        left, right = (torch.randn(side, side, device=self.machine.device) for _ in range(2))
        return left, right

    def look(self) -> RoofsNow:
        """The roofs now: the faster of reading a stream and a product of one row, and a product of squares."""
        read = 4 * self.data.numel() / self.seconds(self.data.sum)
        gemv = 4 * self.weights.numel() / self.seconds(self.one_row)
        return RoofsNow(max(read, gemv), 2.0 * len(self.left) ** 3 / self.seconds(self.product))

    def one_row(self) -> None:
        for weight in self.weights:
            F.linear(self.rows[:1], weight)

    def product(self) -> torch.Tensor:
        return F.linear(self.left, self.right)

    def seconds(self, call: KernelCall, least: int = 1) -> float:
        """The median of a few calls in a row, of `least` so many."""
        taken: list[float] = []
        while len(taken) < least or (len(taken) < _MOST_CALLS and sum(taken) < KERNEL_LOOK_S):
            taken += time_calls(call, self.machine.clock, 1)
        return statistics.median(taken)

    def times(self, call: KernelCall | None) -> Timing:
        """What a call takes once; nothing of no call."""
        return Timing(self.seconds(call, _LEAST_CALLS), 0.0) if call else NOTHING


def known_kernels(bench: KernelBench) -> Iterator[KnownKernel]:
    """Each label with its causes; a kernel is made when it is its turn, to the measure of the roofs of that moment."""
    data, tiny, one, device = bench.data, bench.tiny, bench.one, bench.machine.device

    def tiny_product() -> None:
        F.linear(tiny, tiny)

    wide = torch.randn(2 * len(bench.left), len(bench.left), device=device)
    wide_bytes = 4.0 * (bench.left.numel() + wide.numel() + len(bench.left) * len(wide))
    yield _single(
        "a large matrix product",
        Label("compute-bound"),
        Part(2.0 * bench.left.numel() * len(wide), wide_bytes, lambda: F.linear(bench.left, wide), tiny_product),
    )
    stream = Part(0.0, 4.0 * data.numel(), data.sum, one.sum)
    yield _single("a stream past every cache", Label("memory-bound"), stream)
    yield _product_and_stream(bench)

    def chain() -> None:
        for _ in range(CHAIN_LENGTH):
            one.add_(1)

    yield KnownKernel(
        "a chain of one-element additions",
        Label("overhead-bound"),
        chain,
        chain,
        (Part(1.0 * CHAIN_LENGTH, 8.0 * CHAIN_LENGTH),),
    )
    yield _host_loop(bench)

    weight_bytes = 4.0 * _WIDTH**2

    def row_by_row() -> None:
        for row in bench.rows:
            F.linear(row, bench.weights[0])

    def hollow_row_by_row() -> None:
        for _ in range(_ROWS):
            F.linear(tiny[0], tiny)

    # Reads its weights as often as it has rows, where once would do.
    yield _single(
        f"a product of {_ROWS} rows, row by row",
        Label("kernel-bound", TERM_NAMES["kernel_s"]),
        Part(2.0 * _ROWS * _WIDTH**2, weight_bytes, row_by_row, hollow_row_by_row),
    )
    yield _dequantised(bench)

    def fetched() -> None:
        F.linear(bench.rows[:1], bench.fetch().view(torch.float32).view(_WIDTH, _WIDTH))

    product = Part(2.0 * _WIDTH**2, weight_bytes, lambda: F.linear(bench.rows[:1], bench.weights[0]), tiny_product)
    yield KnownKernel(
        "a product of one row, its weights on the disk",
        Label("link-bound"),
        fetched,
        tiny_product,
        (product,),
        bench.fetch,
    )


def _single(name: str, label: Label, part: Part) -> KnownKernel:
    """A kernel that is one operator."""
    call, hollow = part.call, part.hollow
    assert call is not None
    assert hollow is not None
    return KnownKernel(name, label, call, hollow, (part,))


def _product_and_stream(bench: KernelBench) -> KnownKernel:
    """A product, and as many bytes as take nearly as long."""
    roofs = bench.look()
    flops = 2.0 * len(bench.left) ** 3
    wanted = int(_STREAM_TIMES * flops / roofs.compute_flops_per_s * roofs.memory_bytes_per_s / 4)
    streams = math.ceil(wanted / bench.data.numel())
    data = bench.data[: wanted // streams]

    def stream() -> None:
        for _ in range(streams):
            data.sum()

    def hollow_stream() -> None:
        for _ in range(streams):
            bench.one.sum()

    def hollow_product() -> None:
        F.linear(bench.tiny, bench.tiny)

    def both() -> None:
        bench.product()
        stream()

    def hollow() -> None:
        hollow_product()
        hollow_stream()

    return KnownKernel(
        "a product and a stream, nearly equally long",
        Label("mixed"),
        both,
        hollow,
        (
            Part(flops, 12.0 * bench.left.numel(), bench.product, hollow_product),
            Part(0.0, 4.0 * data.numel() * streams, stream, hollow_stream),
        ),
    )


def _host_loop(bench: KernelBench) -> KnownKernel:
    """Products whose device time is known, in a loop that keeps the host busy for longer."""
    left, right = bench.squares(_SHORT_PRODUCT_S)
    tiny, one = bench.tiny, bench.one

    def products(a: torch.Tensor, b: torch.Tensor) -> None:
        for _ in range(_SHORT_PRODUCTS):
            F.linear(a, b)

    def additions(count: int) -> None:
        for _ in range(count):
            one.add_(1)

    def loop(a: torch.Tensor, b: torch.Tensor) -> None:
        for _ in range(_SHORT_PRODUCTS):
            F.linear(a, b)
            additions(count)

    products_s = bench.seconds(lambda: products(left, right))
    # The fastest: a host that is held up by others now would be given too little work.
    addition_s = min(time_calls(lambda: additions(CHAIN_LENGTH), bench.machine.clock, _MOST_CALLS)) / CHAIN_LENGTH
    count = math.ceil(_HOST_TIMES * products_s / _SHORT_PRODUCTS / addition_s)
    return KnownKernel(
        "short products between a host's own work",
        Label("overhead-bound"),
        lambda: loop(left, right),
        lambda: loop(tiny, tiny),
        (
            Part(
                2.0 * _SHORT_PRODUCTS * len(left) ** 3,
                12.0 * _SHORT_PRODUCTS * left.numel(),
                lambda: products(left, right),
                lambda: products(tiny, tiny),
            ),
        ),
    )


def _dequantised(bench: KernelBench) -> KnownKernel:
    """A product of one row whose int8 weights are made float32, scaled row by row, before each call."""
    packed = torch.randint(-127, 128, (_WIDTH, _WIDTH), device=bench.machine.device, dtype=torch.int8)
    scales = torch.rand(_WIDTH, 1, device=bench.machine.device)
    tiny_packed = packed[:8, :8].contiguous()

    def dense() -> torch.Tensor:
        return packed.float().mul_(scales)

    def product() -> None:
        F.linear(bench.rows[:1], dense())

    def hollow() -> None:
        F.linear(bench.tiny, tiny_packed.float().mul_(scales[:8]))

    return _single(
        "a product of int8 weights, unpacked before it",
        Label("kernel-bound", TERM_NAMES["dequantise_s"]),
        Part(2.0 * _WIDTH**2, 1.0 * packed.numel() + 4.0 * _WIDTH, product, hollow, dense),
    )
