"""Variants that a run tries: dtypes, formats, caches, attention kernels, threads, compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from profiler.counting.attention import AttentionCore
from profiler.engines.caches import quantized_cache
from profiler.engines.registry import ENGINES, quantized_engines
from profiler.errors import RequestError
from profiler.facts.cache_format import CACHE_FORMATS
from profiler.facts.measurements import (
    COMPILED,
    DYNAMIC_CACHE,
    EIGHT_BIT_CACHE,
    GRAPHED,
    PADDING_MASK,
    REPEATED_HEADS,
    STATIC_CACHE,
    UNQUANTISED,
    WITHOUT_CUDNN,
)
from profiler.facts.step import UNFUSED_KERNEL
from profiler.grid.cells import DEFAULT_ENGINE, CellKey
from profiler.loading.request import DTYPES, resolve_dtype
from profiler.measure.subject import Subject
from profiler.quant.registry import Quant, can_quantise, tried_formats

_COMPILING_S, _CAPTURING_S = 25.0, 1.5
"""Seconds to compile a few layers, and to capture a step. On two cores of a Xeon, compiling one layer of SmolLM2-135M
took 16 s and five took 8 s more, mostly in g++. With the disk cache of an earlier run it takes at most 1 s."""
_COMPILING_ON_GPU_S, _COMPILING_A_LAYER_S = 15.0, 1.0
"""Seconds to compile a whole model on a GPU, and for each of its layers. Mistral-7B took at most 50 s on an H100."""


@dataclass(frozen=True)
class Variant:
    """One way to hold and step a model; fields that are None are as in the run."""

    name: str
    """The change, as a sentence names it."""
    dtype: torch.dtype | None = None
    quant: Quant | None = None
    experts: str | None = None
    kernels: tuple[SDPBackend, ...] = ()
    """The kernels that `scaled_dot_product_attention` may call; empty: all."""
    repeated_heads: bool = False
    """Whether keys and values are written out per query head where transformers would pass them as they are."""
    masked: bool = False
    """Whether a padding mask is passed, as for prompts of unequal lengths."""
    engine: str | None = None
    preparing_s: float = 0.0
    """Expected seconds before its engine's first step. Compiling may take longer, as nothing interrupts it."""
    threads: int | None = None

    @property
    def holds_alike(self) -> bool:
        """Whether the weights stay as they are, and only the stepping changes."""
        return (self.dtype, self.quant, self.experts) == (None, None, None)

    @property
    def compiled(self) -> bool:
        """Whether torch.compile makes its decode steps."""
        return self.engine == "compile"

    @property
    def hookable(self) -> bool:
        """Whether its steps run the modules' Python; compiled and captured ones do not."""
        return self.engine is None or ENGINES[self.engine].hookable

    def corners(self, keys: Sequence[CellKey]) -> Sequence[CellKey]:
        """Return the cells of `keys` at which it is tried.

        Code is compiled or captured for every shape: the first decode step represents all of them. On a static cache no
        prefill changes.
        """
        decodes = [key for key in keys if key.phase == "decode"]
        if not self.hookable:
            return decodes[:1]
        return decodes if self.engine == "static" else keys


def variants_of(subject: Subject, compiling: bool = False) -> list[Variant]:
    """Return the variants that this machine has, the most promising first; the last ones are left out if time is short.

    `compiling` adds torch.compile.
    """
    request, machine = subject.request, subject.machine
    # Any dtype is worth a trial on a CPU; on CUDA, 16 bits that it has units for.
    sixteen_bit = {torch.float16, *([torch.bfloat16] if machine.info.capability >= (8, 0) else [])}
    worth = sixteen_bit if machine.is_cuda else set(DTYPES.values())
    prefix = "" if request.quant == "none" else UNQUANTISED
    dense = [Variant(prefix + name, dtype, "none") for name, dtype in DTYPES.items() if dtype in worth]
    others = [variant for variant in dense if (variant.dtype, variant.quant) != (request.dtype, request.quant)]
    dtypes = sorted(others, key=lambda variant: variant.dtype is not torch.bfloat16)
    quants = []
    for name in (item.name for item in tried_formats() if can_quantise(item.name) and item.name != request.quant):
        is_wide = request.dtype is torch.float32
        dtype = resolve_dtype("auto", name, request.device, None) if is_wide else request.dtype
        quants.append(Variant(name, dtype, name))
    # A quantised model was quantised for a reason, mostly memory: another format comes before none.
    ordered = [*dtypes[:1], *quants[:3]] if request.quant == "none" else [*quants[:3], *dtypes[:1]]
    for variants in VARIANTS:
        ordered += [variant for variant in variants(subject) if compiling or not variant.compiled]
    return [*ordered, *dtypes[1:], *quants[3:]]


def _engines(subject: Subject) -> Iterator[Variant]:
    first = next(iter(subject.engines))
    if subject.engines[first].cache_format is not None:
        yield Variant(DYNAMIC_CACHE, engine=DEFAULT_ENGINE)
    if first == DEFAULT_ENGINE:
        if subject.machine.captures and "graph" not in subject.engines:
            yield Variant(GRAPHED, engine="graph", preparing_s=_CAPTURING_S)
        yield Variant(STATIC_CACHE, engine="static")
        with suppress(RequestError):  # an older transformers, or a model with windows
            quantized_cache(subject.loaded.config, CACHE_FORMATS["fp8"])
            yield Variant(EIGHT_BIT_CACHE, engine=quantized_engines()["fp8"])
        if "compile" not in subject.engines:
            layers = subject.loaded.config.get_text_config().num_hidden_layers
            on_gpu_s = _COMPILING_ON_GPU_S + _COMPILING_A_LAYER_S * layers
            compiling_s = on_gpu_s if subject.machine.is_cuda else _COMPILING_S
            yield Variant(COMPILED, engine="compile", preparing_s=compiling_s)


def _experts(subject: Subject) -> Iterator[Variant]:
    for name in ("grouped_mm", "batched_mm", "eager"):
        if subject.experts and name != subject.experts:
            yield Variant(f"{name} experts", experts=name)


def _attention(subject: Subject) -> Iterator[Variant]:
    """Attention kernels of `scaled_dot_product_attention` that this device has, without those of the run.

    On CUDA, flash and cuDNN need compute capability 8.0 and 16-bit tensors, and the memory-efficient kernel takes no
    grouped heads (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Where grouped heads leave only the math
    kernel, repeated ones have a fused one: on a T4 steps of 18 and 32 sequences became 1.6 and 1.8 times faster
    (transformers issue 45776). A padding mask is tried with and without the kernels; CUDA's flash kernel accepts none.
    """
    config, is_cuda = subject.loaded.config.get_text_config(), subject.machine.is_cuda
    grouped = any(core.query_heads != core.kv_heads for core in subject.work.of_kind(AttentionCore))
    names = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
    if is_cuda:
        names = {"math": SDPBackend.MATH}
        if not grouped:
            names["memory-efficient"] = SDPBackend.EFFICIENT_ATTENTION
        if subject.machine.info.capability >= (8, 0) and subject.request.dtype.itemsize == 2:
            names |= {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    run_kernels = {path.kernel for path in subject.paths.values()}
    if getattr(config, "_attn_implementation", None) != "sdpa":
        names = {}
    elif is_cuda and grouped and UNFUSED_KERNEL in run_kernels:
        yield Variant(REPEATED_HEADS, repeated_heads=True)
    elif is_cuda and "cudnn" in run_kernels:
        # What a user can switch off; flash is then torch's next choice, and needs no trial of its own.
        names.pop("flash")
        yield Variant(
            WITHOUT_CUDNN, kernels=(names["math"], SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION)
        )
    kernels = {name: kernel for name, kernel in names.items() if name not in run_kernels}
    # No fused kernel of a GPU is slower than the math kernel.
    worth = {name: kernel for name, kernel in kernels.items() if not (is_cuda and name == "math")}
    for name, kernel in worth.items():
        yield Variant(f"{name} attention", kernels=(kernel,))
    yield Variant(PADDING_MASK, masked=True)
    for name, kernel in worth.items():
        if kernel is not SDPBackend.FLASH_ATTENTION or not is_cuda:
            yield Variant(f"{PADDING_MASK} and {name} attention", kernels=(kernel,), masked=True)


def _threads(subject: Subject) -> Iterator[Variant]:
    threads = torch.get_num_threads()
    if not subject.machine.is_cuda and threads > 1:
        yield Variant(f"{threads // 2} of {threads} threads", threads=threads // 2)


VARIANTS: list[Callable[[Subject], Iterable[Variant]]] = [_engines, _experts, _attention, _threads]
"""Functions that return the variants of one kind for a model on a machine; registries give dtypes and formats."""
