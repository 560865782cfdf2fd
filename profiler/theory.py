"""What the ceilings allow, before anything runs: kernels, models and GPUs for notebooks and scripts.

    from profiler import theory
    theory.matmul(1, 4096, 4096, "bfloat16").intensity  # 1.0 FLOP/byte
    theory.gpu("H100 SXM").ridge_flops_per_byte("bfloat16")  # 295 FLOP/byte

Kernels are matmuls, element-wise kernels and attention, with their FLOPs, bytes and arithmetic intensity.
Nothing here measures, downloads or needs a GPU. `profiler.profile` measures.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from profiler.counting.attention import SOFTMAX_FLOPS_PER_SCORE
from profiler.counting.cache import counted_model
from profiler.counting.count import count, model_work
from profiler.counting.floor import floor_s
from profiler.counting.grid_count import GridCount, check_countable, count_grid
from profiler.counting.kernels import causal_pairs
from profiler.counting.memory_need import cache_bytes
from profiler.counting.model_numbers import ModelNumbers, model_numbers
from profiler.data.ceiling_set import ceilings_called
from profiler.data.datasheets import gpu_called as gpu
from profiler.data.datasheets import gpus
from profiler.data.links import bus_share
from profiler.data.links import link_called as link
from profiler.errors import RequestError, near_misses
from profiler.facts.step import ExecutionPath, Step
from profiler.loading.source import resolve
from profiler.report.plots.style import STYLE_FILE
from profiler.report.plots.theory import draw_grid

__all__ = [
    "ExecutionPath", "Kernel", "Step", "attention_steps", "bus_share", "cache_bytes", "combined", "count",
    "elementwise", "fused_attention", "gpu", "gpus", "grid", "link", "matmul", "model_work", "numbers", "picture",
    "use_style",
]  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """One kernel: its FLOPs, and its traffic with memory in bytes (its whole inputs and outputs, once each)."""

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
        """Return the least seconds on a device with these two ceilings."""
        return floor_s(self.flops, self.bytes, peak_flops_per_s, bytes_per_s)


def bytes_per_element(dtype: str) -> float:
    """Return the bytes of an element; `nf4` and `fp4` include scales, `int4` does not. Raises RequestError."""
    if dtype not in _BITS:
        raise RequestError(f"the size of {dtype!r} is not known; use {', '.join(_BITS)}.{near_misses(dtype, _BITS)}")
    return _BITS[dtype] / 8


_BITS = {
    "float64": 64, "float32": 32, "tfloat32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8,
    "int8": 8, "int4": 4, "nf4": 4.5, "fp4": 4.5,
}  # fmt: skip


def matmul(m: int, n: int, k: int, dtype: str, weights: str = "") -> Kernel:
    """Return [m, k] x [k, n]: 2mnk FLOPs; `weights` is another dtype of [k, n], such as `nf4`. Raises RequestError."""
    activations = (m * k + m * n) * bytes_per_element(dtype)
    return Kernel(f"{m}x{k} @ {k}x{n}", 2 * m * n * k, activations + k * n * bytes_per_element(weights or dtype))


def elementwise(elements: int, flops_each: int, operands: int, dtype: str) -> Kernel:
    """Return a kernel that reads or writes `operands` tensors of `elements`, with `flops_each` per element."""
    return Kernel("element-wise", elements * flops_each, elements * operands * bytes_per_element(dtype))


def attention_steps(query: int, keys: int, head_dim: int, dtype: str) -> tuple[Kernel, ...]:
    """Return S = QK^T, P = softmax(S), O = PV of a head: Q [query, head_dim], K [keys, head_dim], S [query, keys]."""
    scores, itemsize = query * keys, bytes_per_element(dtype)
    return (
        Kernel("QK^T", 2 * scores * head_dim, ((query + keys) * head_dim + scores) * itemsize),
        Kernel("softmax", SOFTMAX_FLOPS_PER_SCORE * scores, 2 * scores * itemsize),
        Kernel("PV", 2 * scores * head_dim, (scores + (keys + query) * head_dim) * itemsize),
    )


def fused_attention(
    query: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    *,
    cache: str = "",
    causal: bool = True,
) -> Kernel:
    """Return one kernel: Q, O [query, heads, head_dim], K, V [context + query, kv_heads, head_dim] in dtype `cache`."""
    keys = context + query
    pairs = int(causal_pairs(query, context)) if causal else query * keys
    of_queries = 2 * query * heads * head_dim * bytes_per_element(dtype)
    of_keys = 2 * keys * kv_heads * head_dim * bytes_per_element(cache or dtype)
    return Kernel("fused attention", 4 * pairs * heads * head_dim, of_queries + of_keys)


def combined(name: str, *kernels: Kernel) -> Kernel:
    """Return one kernel with the sum of the FLOPs and bytes of `kernels`."""
    return Kernel(name, sum(kernel.flops for kernel in kernels), sum(kernel.bytes for kernel in kernels))


def grid(
    model: str,
    *,
    gpus: Sequence[str] = (),
    batch_sizes: Sequence[int] = (1,),
    prompt_lens: Sequence[int] = (),
    context_lens: Sequence[int] = (),
    dtype: str = "auto",
    quant: str = "none",
) -> GridCount:
    """Count the prefill of every prompt length and a decode step after every context, at every batch size.

    The result has arrays [n]: FLOPs, bytes, memory, and the floor on each of `gpus`. Raises RequestError or ModelError.
    """
    counted = counted_model(resolve(model), dtype, quant)
    counts = count_grid(
        model,
        counted,
        quant,
        batch_sizes=batch_sizes,
        prompt_lens=prompt_lens,
        context_lens=context_lens,
        gpus=[ceilings_called(name) for name in gpus],
    )
    check_countable(counts, counted.work)
    return counts


def numbers(
    model: str, context_len: int, *, gpus: Sequence[str] = (), dtype: str = "auto", quant: str = "none"
) -> ModelNumbers:
    """Return a model's sizes, its KV cache, and what each of `gpus` allows. Raises RequestError or ModelError."""
    counted = counted_model(resolve(model), dtype, quant)
    return model_numbers(counted, context_len, tuple(ceilings_called(name) for name in gpus))


def picture(counted: GridCount, name: str) -> Figure:
    """Draw a counted grid: `roofline`, which needs a GPU (else RequestError), or `kv`."""
    return draw_grid(counted, name, f"the picture {name!r}", 'gpus=["T4"] to `theory.grid`')


def use_style() -> None:
    """Draw all further figures of this process in the project's style, with powers of ten on log axes."""
    plt.style.use(STYLE_FILE)
    plt.rcParams["text.parse_math"] = True
