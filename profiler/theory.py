"""What the roofs allow, before anything runs: kernels, models and GPUs for notebooks and scripts.

    from profiler import theory
    theory.matmul(1, 4096, 4096, "bfloat16").intensity  # 1.0 FLOP/byte
    theory.gpu("H100 SXM").ridge_flops_per_byte("bfloat16")  # 295 FLOP/byte

Nothing here measures, downloads or needs a GPU. `profiler.profile` measures.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from profiler.counting.count import count, model_work
from profiler.counting.grid_count import GridCount, count_grid
from profiler.counting.intensity import Kernel, attention_steps, combined, elementwise, fused_attention, matmul
from profiler.counting.memory_need import cache_bytes
from profiler.counting.model_numbers import ModelNumbers, model_numbers
from profiler.counting.preset_counts import counted_model
from profiler.data.datasheets import gpu_called as gpu
from profiler.data.datasheets import gpus
from profiler.data.links import bus_share
from profiler.data.links import link_called as link
from profiler.facts.step import ExecutionPath, Step
from profiler.gpu_profile.profile import roofs_called
from profiler.loading.source import resolve
from profiler.report.plots.style import STYLE_FILE
from profiler.report.plots.theory import THEORY_PLOTS

__all__ = [
    "ExecutionPath",
    "Kernel",
    "Step",
    "attention_steps",
    "bus_share",
    "cache_bytes",
    "combined",
    "count",
    "elementwise",
    "fused_attention",
    "gpu",
    "gpus",
    "grid",
    "link",
    "matmul",
    "model_work",
    "numbers",
    "picture",
    "use_style",
]


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

    `model` is a preset, a hub id or a folder; each of `gpus` a datasheet's or a profile's name. The result has FLOPs,
    bytes and memory of each step as arrays [n], and their floor in seconds on each GPU. Raises RequestError or
    ModelError.
    """
    return count_grid(
        model,
        counted_model(resolve(model), dtype, quant),
        quant,
        batch_sizes=batch_sizes,
        prompt_lens=prompt_lens,
        context_lens=context_lens,
        gpus=[roofs_called(name) for name in gpus],
    )


def numbers(
    model: str, context_len: int, *, gpus: Sequence[str] = (), dtype: str = "auto", quant: str = "none"
) -> ModelNumbers:
    """Return a model's sizes, its KV cache at a context, and per GPU the largest batch and the tokens/s at most.

    `model` is a preset, a hub id or a folder; each of `gpus` a datasheet's or a profile's name. Raises RequestError or
    ModelError.
    """
    counted = counted_model(resolve(model), dtype, quant)
    return model_numbers(counted, context_len, tuple(roofs_called(name) for name in gpus))


def picture(counted: GridCount, name: str) -> Figure:
    """Draw a counted grid: `roofline`, `map`, `intensity`, `latency` or `kv`. All but the last two need a GPU.

    Raises KeyError for another name.
    """
    return THEORY_PLOTS[name](counted)


def use_style() -> None:
    """Draw all further figures of this process in the project's style, with powers of ten on log axes."""
    plt.style.use(STYLE_FILE)
    plt.rcParams["text.parse_math"] = True
