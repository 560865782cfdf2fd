"""FLOPs, bytes and arithmetic intensity of single kernels: matrix products, element-wise kernels and attention."""

from __future__ import annotations

from dataclasses import dataclass

from profiler.counting.attention import SOFTMAX_FLOPS_PER_SCORE, causal_pairs
from profiler.counting.floor import floor_s


@dataclass(frozen=True)
class Kernel:
    """One kernel: its FLOPs, and its traffic with memory in bytes."""

    name: str
    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def attainable_flops_per_s(self, peak_flops_per_s: float, bytes_per_s: float) -> float:
        """Return the roofline, min(peak, intensity x bandwidth) (Williams, Waterman, Patterson, CACM 52(4), 2009)."""
        return min(peak_flops_per_s, self.intensity * bytes_per_s)

    def floor_s(self, peak_flops_per_s: float, bytes_per_s: float) -> float:
        """Return the least seconds on a device with these two roofs."""
        return floor_s(self.flops, self.bytes, peak_flops_per_s, bytes_per_s)


def matmul(m: int, n: int, k: int, itemsize: float) -> Kernel:
    """Return the product [m, k] x [k, n], which reads both operands once and writes the result once."""
    return Kernel(f"{m}x{k} @ {k}x{n}", 2 * m * n * k, (m * k + k * n + m * n) * itemsize)


def elementwise(elements: int, flops_each: int, operands: int, itemsize: float) -> Kernel:
    """Return a kernel that reads or writes `operands` tensors of `elements`, with `flops_each` per element."""
    return Kernel("element-wise", elements * flops_each, elements * operands * itemsize)


def attention_steps(query: int, keys: int, head_dim: int, itemsize: float) -> tuple[Kernel, ...]:
    """Return the kernels of one head of unfused attention without a mask: S = QK^T, P = softmax(S), O = PV.

    Each reads its operands from memory and writes its result to memory.
    """
    scores = query * keys
    return (
        Kernel("QK^T", 2 * scores * head_dim, ((query + keys) * head_dim + scores) * itemsize),
        Kernel("softmax", SOFTMAX_FLOPS_PER_SCORE * scores, 2 * scores * itemsize),
        Kernel("PV", 2 * scores * head_dim, (scores + (keys + query) * head_dim) * itemsize),
    )


def fused_attention(
    query: int, context: int, heads: int, kv_heads: int, head_dim: int, itemsize: float, *, causal: bool = True
) -> Kernel:
    """Return attention of one sequence as one kernel, which reads Q, K, V once, writes O once, and stores no scores.

    FLOPs are those of the two matrix products, over the pairs of causal attention, or over all pairs without it.
    """
    keys = context + query
    pairs = int(causal_pairs(query, context)) if causal else query * keys
    vectors = 2 * query * heads + 2 * keys * kv_heads
    return Kernel("fused attention", 4 * pairs * heads * head_dim, vectors * head_dim * itemsize)


def combined(name: str, *kernels: Kernel) -> Kernel:
    """Return one kernel with the sum of the FLOPs and bytes of `kernels`."""
    return Kernel(name, sum(kernel.flops for kernel in kernels), sum(kernel.bytes for kernel in kernels))
