"""Eight kernels whose label is known in advance, judged by the same time breakdown and rules as a model's step."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from profiler.device.clock import no_gc, time_calls
from profiler.device.machine import Machine
from profiler.errors import RequestError
from profiler.facts.ceilings import Ceilings
from profiler.facts.operators import OperatorWork
from profiler.facts.overhead import Overhead
from profiler.grid.cells import Cell, CellKey
from profiler.judge.breakdown import TERM_NAMES, Demand, StepCeilings, TimeBreakdown, break_down
from profiler.judge.cell_stages import Timed
from profiler.judge.regimes import DOMINANCE, Measurement, judge_cell
from profiler.roofs.bandwidth import disk_fetch
from profiler.stats import Estimate

Call = Callable[[], object]
UNKNOWN = "inconclusive"
CHAIN, LEAST_ROUNDS, MOST_ROUNDS = 2000, 6, 15
LOOK_S = 30e-3
"""Calls are repeated for this long, or five times: longer than the time slice of another process on the core."""
_AGREEING = 0.8
"""Share of rounds that must give the same label; other work on the machine may disturb a single round."""
_ABOVE_CEILING = 1.25
"""A kernel that exceeds its ceiling by this factor shows that the ceiling is wrong; other shapes differ by less."""
_WIDTH, _ROWS = 4096, 16
"""Rows of a weight matrix, or more: a cache that holds its 64 MiB would serve all rows of a matmul but one."""


@dataclass(frozen=True)
class Part:
    """An operator of a known kernel: its work, and calls that run only it, and its overhead (on tiny tensors)."""

    flops: float
    nbytes: float
    call: Call | None = None
    """None if the operator is almost entirely overhead."""
    narrow: Call | None = None
    convert: Call | None = None


@dataclass(frozen=True)
class Kernel:
    """Calls whose label is known: a regime, and the largest term of one that is slow-kernels."""

    name: str
    label: str
    parts: tuple[Part, ...]
    host: Call | None = None
    fetch: Call | None = None

    def calls(self, machine: Machine) -> list[Call | None]:
        """Return the kernel, its overhead and its transfer; then each part, its own overhead, and its conversion."""
        whole = in_order(self.fetch, *(part.call for part in self.parts), self.host)
        calls = [whole, in_order(*(part.narrow for part in self.parts), self.host), self.fetch]
        for part in self.parts:
            narrow = None if machine.captures else part.narrow  # a captured part is replayed without overhead
            calls += [_captured(part.call, machine), narrow, _captured(part.convert, machine)]
        return calls


def in_order(*calls: Call | None, times: int = 1) -> Call:
    """Return a call that makes `calls` one after the other, `times` over."""

    def run() -> None:
        for call in [call for call in calls if call] * times:
            call()

    return run


def _captured(call: Call | None, machine: Machine) -> Call | None:
    """Return the call as a CUDA graph, like the replayed kernels of a cell, or the call itself if it has none."""
    if call is None or not machine.captures:
        return call
    with machine.on_side_stream():
        call()
    try:
        return machine.capture(call)
    except RequestError:
        return call


class Buffers:
    """What all kernels share, and the ceilings of the moment, measured on it."""

    def __init__(self, machine: Machine, ceilings: Ceilings, stack: ExitStack) -> None:
        self.machine, self.flops_per_s = machine, ceilings.compute_flops_per_s("float32")
        # The least multiple of 1024 whose square in float32 has the size of two caches.
        cached = 1024 * math.ceil(math.sqrt(2 * machine.info.last_level_cache_bytes / 4) / 1024)
        self.width = width = max(_WIDTH, cached)
        self.data = torch.rand(max(ceilings.stream_bytes // 4, width**2), device=machine.device)
        self.weights = self.data[: self.data.numel() // width**2 * width**2].view(-1, width, width)
        self.rows = torch.randn(_ROWS, width, device=machine.device)
        self.tiny, self.one = torch.zeros(8, 8, device=machine.device), torch.zeros(1, device=machine.device)
        self.left, self.right = self.squares(10e-3)
        self.fetch = stack.enter_context(disk_fetch(4 * _WIDTH**2, machine))

    def squares(self, seconds: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two square matrices whose matmul takes about `seconds`."""
        side = 1 << max(5, round(math.log2(seconds * self.flops_per_s / 2) / 3))
        left, right = torch.randn(2, side, side, device=self.machine.device)
        return left, right

    def ceilings(self) -> tuple[float, float]:
        """Return bytes/s (the faster of a stream and matmuls of one row) and FLOP/s."""
        one_row = in_order(*(partial(F.linear, self.rows[:1], weight) for weight in self.weights))
        read_per_s = self.data.nbytes / self.seconds(self.data.sum, 1)
        flops_per_s = 2.0 * len(self.left) ** 3 / self.seconds(partial(F.linear, self.left, self.right), 1)
        return max(read_per_s, self.weights.nbytes / self.seconds(one_row, 1)), flops_per_s

    def seconds(self, call: Call | None, least: int = 3) -> float:
        """Return the median seconds of a few calls in a row; 0 without a call."""
        times_s: list[float] = []
        while call and (len(times_s) < least or (len(times_s) < 5 and sum(times_s) < LOOK_S)):
            times_s += time_calls(call, self.machine.clock, 1)
        return statistics.median(times_s or [0.0])


def known_kernels(at: Buffers) -> Iterator[Kernel]:
    """Yield kernels of every label. Each is built when it is needed, by the ceilings of that moment."""
    left, width, tiny, device = at.left, at.width, at.tiny, at.machine.device
    tiny_matmul, square_flops = partial(F.linear, tiny, tiny), 2.0 * len(left) ** 3
    wide = torch.randn(2 * len(left), len(left), device=device)
    nbytes = 4.0 * (left.numel() + wide.numel() + len(left) * len(wide))
    matmul = Part(2 * square_flops, nbytes, partial(F.linear, left, wide), tiny_matmul)
    yield Kernel("a large matmul", "compute-bound", (matmul,))
    stream = Part(0.0, at.data.nbytes, at.data.sum, at.one.sum)
    yield Kernel("a stream past every cache", "memory-bound", (stream,))

    # The stream takes 1.1 times as long as the matmul, in the middle of the mixed regime.
    memory_per_s, compute_per_s = at.ceilings()
    stream_bytes = 1.1 * square_flops / compute_per_s * memory_per_s
    times = math.ceil(stream_bytes / at.data.nbytes)
    data = at.data[: int(stream_bytes / times / 4)]
    matmul = Part(square_flops, 12.0 * left.numel(), partial(F.linear, left, at.right), tiny_matmul)
    stream = Part(0.0, times * data.nbytes, in_order(data.sum, times=times), in_order(at.one.sum, times=times))
    yield Kernel("a matmul and a stream, nearly equally long", "mixed", (matmul, stream))

    addition = partial(at.one.add_, 1)
    chain = in_order(addition, times=CHAIN)
    yield Kernel("a chain of one-element additions", "overhead-bound", (Part(1.0 * CHAIN, 8.0 * CHAIN),), chain)

    # The host works six times as long as the device. The least time of an addition: a larger one, while other
    # processes delay the host, would give it too little work.
    short, short_right = at.squares(1e-3)
    multiply = in_order(partial(F.linear, short, short_right), times=4)
    addition_s = min(time_calls(chain, at.machine.clock, 5)) / CHAIN
    own_work = in_order(addition, times=math.ceil(6 * at.seconds(multiply) / addition_s))
    matmul = Part(8.0 * len(short) ** 3, 48.0 * short.numel(), multiply, in_order(tiny_matmul, times=4))
    yield Kernel("short matmuls and a host's own work", "overhead-bound", (matmul,), own_work)

    # It reads its weights once per row, where once in total is enough.
    by_row = in_order(*(partial(F.linear, row, at.weights[0]) for row in at.rows))
    narrow = in_order(partial(F.linear, tiny[0], tiny), times=_ROWS)
    matmul = Part(2.0 * _ROWS * width**2, 4.0 * width**2, by_row, narrow)
    yield Kernel("a matmul of 16 rows, row by row", f"slow-kernels, {TERM_NAMES['kernel_s']}", (matmul,))

    packed = torch.randint(-127, 128, (width, width), device=device, dtype=torch.int8)
    scales, few = torch.rand(width, 1, device=device), packed[:8, :8].contiguous()
    matmul = Part(
        2.0 * width**2,
        packed.nbytes + 4.0 * width,
        lambda: F.linear(at.rows[:1], packed.float().mul_(scales)),
        lambda: F.linear(tiny, few.float().mul_(scales[:8])),
        lambda: packed.float().mul_(scales),
    )
    label = f"slow-kernels, {TERM_NAMES['dequantise_s']}"
    yield Kernel("a matmul of int8 weights, unpacked before it", label, (matmul,))

    weights = at.data[: _WIDTH**2].view(_WIDTH, _WIDTH)
    matmul = Part(2.0 * _WIDTH**2, weights.nbytes, partial(F.linear, at.rows[:1, :_WIDTH], weights), tiny_matmul)
    yield Kernel("weights from the disk, and a matmul of one row", "link-bound", (matmul,), fetch=at.fetch)


@dataclass(frozen=True)
class Judged:
    """A known kernel and its label, which is unknown if the rounds disagree."""

    kernel: Kernel
    label: str
    rounds: Counter[str]
    split: TimeBreakdown

    @property
    def is_wrong(self) -> bool:
        return self.label not in (self.kernel.label, UNKNOWN)


def judged_kernels(machine: Machine, ceilings: Ceilings, seconds: float = 3.0) -> Iterator[Judged]:
    """Time each known kernel for about `seconds`, and judge it in rounds.

    The ceilings of a shared machine change from minute to minute (memory: 42, 78, 92 and 103 GB/s in four runs on one
    virtual machine). So each round measures them again, and `ceilings`, which were measured before, must agree.
    """
    before = ceilings.memory_bytes_per_s, ceilings.compute_flops_per_s("float32")
    with torch.inference_mode(), no_gc(), ExitStack() as stack:
        at = Buffers(machine, ceilings, stack)
        for kernel in known_kernels(at):
            calls, rounds, labels = kernel.calls(machine), list[list[float]](), Counter[str]()
            for call in calls:
                at.seconds(call)
            end_s = machine.now_s() + seconds
            while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and machine.now_s() < end_s):
                ceilings = at.ceilings()
                rounds.append([at.seconds(call) for call in calls])
                labels[judge(kernel, rounds[-1], ceilings, machine)[0]] += 1
            [(label, count)] = labels.most_common(1)
            medians_s = [statistics.median(each) for each in zip(*rounds, strict=True)]
            of_all, split = judge(kernel, medians_s, before, machine)
            agree = label == of_all and count >= _AGREEING * len(rounds)
            yield Judged(kernel, label if agree else UNKNOWN, labels, split)


def judge(
    kernel: Kernel, seconds: Sequence[float], ceilings: tuple[float, float], machine: Machine
) -> tuple[str, TimeBreakdown]:
    """Return the label of a kernel by the seconds of its calls and by these ceilings, and its time breakdown."""
    (memory_per_s, compute_per_s), (whole_s, overhead_model_s, fetch_s, *of_parts) = ceilings, seconds
    demands = [
        Demand(
            kernel.name, "other", part.flops, part.nbytes, 0.0, compute_per_s, call_s if part.call else None,
            dequantise_s=convert_s,
        )
        for part, call_s, convert_s in zip(kernel.parts, of_parts[::3], of_parts[2::3], strict=True)
    ]  # fmt: skip
    overhead = Overhead(overhead_model_s, min(sum(of_parts[1::3]), overhead_model_s))
    step_ceilings = StepCeilings(memory_per_s, overhead, machine.is_cuda, fetch_s=fetch_s)
    split = break_down(whole_s, demands, 0.0, step_ceilings)
    key = CellKey("decode", Cell(1, 1, 1))
    work = [OperatorWork("", "other", 1, "float32", part.flops, part.nbytes, 0.0, 0.0) for part in kernel.parts]
    cell = Timed(key, work, "ok", time=Estimate(whole_s, whole_s, whole_s, 1))
    verdict = judge_cell(Measurement(split, cell, compute_per_s, step_ceilings))
    if split.attained > _ABOVE_CEILING:
        return UNKNOWN, split
    if verdict.regime != "slow-kernels":
        return verdict.regime, split
    low, high = sorted(("kernel_s", "dequantise_s"), key=lambda term: getattr(split, term))
    if getattr(split, high) < DOMINANCE * getattr(split, low):
        return UNKNOWN, split
    return f"slow-kernels, {TERM_NAMES[high]}", split
