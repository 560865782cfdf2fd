"""Known kernels through the same roofs, split and verdict as a model: each must get its own label."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from profiler.diagnosis.regimes import Measurement, Regime, Verdict, judge
from profiler.diagnosis.step_time import Demand, Dispatch, Roofs, split
from profiler.machine.machine import Machine
from profiler.roofs.sampling import sample
from profiler.roofs.values import Ceilings

_CHAIN = 2000
_GEMM_SIZE = {"cpu": 2048, "cuda": 8192}
_SAMPLE_S = 1.0


@dataclass(frozen=True)
class KnownKernel:
    """A call whose regime is known beforehand, with the work that it does."""

    name: str
    expected: Regime
    call: Callable[[], object]
    parts: tuple[tuple[float, float], ...]
    """(FLOPs, bytes) of each operator in it."""
    hollow: Callable[[], object]
    """The same calls with nothing to do: their dispatch."""


@dataclass(frozen=True)
class SelftestResult:
    """What a known kernel was called."""

    name: str
    expected: Regime
    latency_s: float
    verdict: Verdict

    @property
    def right(self) -> bool:
        return self.verdict.regime == self.expected


def run_selftest(machine: Machine, ceilings: Ceilings) -> list[SelftestResult]:
    """Time and judge each known kernel against the measured roofs."""
    return [_judge(kernel, machine, ceilings) for kernel in _kernels(machine.device, ceilings)]


def _kernels(device: torch.device, ceilings: Ceilings) -> Sequence[KnownKernel]:
    size = _GEMM_SIZE[device.type]
    x, w = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    data = torch.rand(ceilings.stream_bytes // 4, device=device)
    one = torch.zeros(1, device=device)
    tiny = torch.zeros(8, 8, device=device)

    gemm_flops, gemm_bytes = 2.0 * size**3, 3.0 * 4 * size**2
    gemm_s = gemm_flops / ceilings.compute_flops_per_s("float32")
    # As many bytes as take as long as the product does.
    equal_bytes = gemm_s * ceilings.memory_bytes_per_s
    streams = math.ceil(equal_bytes / (4 * data.numel()))
    part = data[: int(equal_bytes / streams / 4)]

    def product_and_stream() -> None:
        F.linear(x, w)
        for _ in range(streams):
            part.sum()

    def hollow_product_and_stream() -> None:
        F.linear(tiny, tiny)
        for _ in range(streams):
            one.sum()

    def chain() -> None:
        for _ in range(_CHAIN):
            one.add_(1)

    return (
        KnownKernel(
            "a large matrix product",
            "compute-bound",
            lambda: F.linear(x, w),
            ((gemm_flops, gemm_bytes),),
            lambda: F.linear(tiny, tiny),
        ),
        KnownKernel("a stream past every cache", "memory-bound", data.sum, ((0.0, 4.0 * data.numel()),), one.sum),
        KnownKernel(
            "a chain of one-element additions", "overhead-bound", chain, ((1.0 * _CHAIN, 8.0 * _CHAIN),), chain
        ),
        KnownKernel(
            "a product and a stream, equally long",
            "mixed",
            product_and_stream,
            ((gemm_flops, gemm_bytes), (0.0, 4.0 * part.numel() * streams)),
            hollow_product_and_stream,
        ),
    )


def _judge(kernel: KnownKernel, machine: Machine, ceilings: Ceilings) -> SelftestResult:
    seconds = sample(kernel.call, machine, _SAMPLE_S)
    hollow_s = min(sample(kernel.hollow, machine, _SAMPLE_S / 4))
    latency_s = statistics.median(seconds)
    compute = ceilings.compute_flops_per_s("float32")
    demands = [Demand(kernel.name, "other", flops, moved, 0.0, compute) for flops, moved in kernel.parts]
    roofs = Roofs(ceilings.memory_bytes_per_s, Dispatch(hollow_s, 0.0), machine.info.overlaps_dispatch)
    quartiles = statistics.quantiles(seconds, n=4)
    verdict = judge(
        Measurement(
            split=split(latency_s, demands, 0.0, roofs),
            model_flops=sum(flops for flops, _ in kernel.parts),
            model_bytes=sum(moved for _, moved in kernel.parts),
            compute_flops_per_s=compute,
            roofs=roofs,
            latency_low_s=quartiles[0],
            latency_high_s=quartiles[2],
        )
    )
    return SelftestResult(kernel.name, kernel.expected, latency_s, verdict)
