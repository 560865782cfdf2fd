"""FLOPs, bytes and arithmetic intensity of single products and of attention, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from profiler.counting.attention import SOFTMAX_FLOPS_PER_SCORE, causal_pairs
from profiler.counting.floor import floor_s


@dataclass(frozen=True)
class Kernel:
    """One thing that a device runs: its arithmetic, and its traffic with memory."""

    name: str
    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def attainable_flops_per_s(self, peak_flops_per_s: float, bytes_per_s: float) -> float:
        """The roofline: min(peak, intensity x bandwidth) (Williams, Waterman and Patterson, CACM 52(4), 2009)."""
        return min(peak_flops_per_s, self.intensity * bytes_per_s)

    def floor_s(self, peak_flops_per_s: float, bytes_per_s: float) -> float:
        """The least time that a device with these two roofs needs."""
        return floor_s(self.flops, self.bytes, peak_flops_per_s, bytes_per_s)


def matmul(m: int, n: int, k: int, itemsize: float) -> Kernel:
    """[m, k] x [k, n]: both operands read once, the product written once."""
    return Kernel(f"{m}x{k} @ {k}x{n}", 2 * m * n * k, (m * k + k * n + m * n) * itemsize)


def elementwise(elements: int, flops_each: int, operands: int, itemsize: float) -> Kernel:
    """A kernel that reads or writes `operands` tensors of so many elements, with `flops_each` for each element."""
    return Kernel("element-wise", elements * flops_each, elements * operands * itemsize)


def attention_steps(query: int, keys: int, head_dim: int, itemsize: float) -> tuple[Kernel, ...]:
    """One head of unfused attention without a mask: S = QK^T, P = softmax(S), O = PV, each read and written in full."""
    scores = query * keys
    return (
        Kernel("QK^T", 2 * scores * head_dim, ((query + keys) * head_dim + scores) * itemsize),
        Kernel("softmax", SOFTMAX_FLOPS_PER_SCORE * scores, 2 * scores * itemsize),
        Kernel("PV", 2 * scores * head_dim, (scores + (keys + query) * head_dim) * itemsize),
    )


def fused_attention(
    query: int, context: int, heads: int, kv_heads: int, head_dim: int, itemsize: float, *, causal: bool = True
) -> Kernel:
    """Attention of one sequence in one kernel: Q, K, V read once and O written once, scores kept on chip.

    The two products alone are counted, over the pairs that causal attention needs or, without it, over all of them.
    """
    keys = context + query
    pairs = int(causal_pairs(query, context)) if causal else query * keys
    moved = 2 * query * heads + 2 * keys * kv_heads
    return Kernel("fused attention", 4 * pairs * heads * head_dim, moved * head_dim * itemsize)


def combined(name: str, *kernels: Kernel) -> Kernel:
    """Several kernels as one: their FLOPs and bytes added up."""
    return Kernel(name, sum(kernel.flops for kernel in kernels), sum(kernel.bytes for kernel in kernels))
