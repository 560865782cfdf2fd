"""Variants that a run tries: dtypes, formats, caches, attention kernels, threads, compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from profiler.device.machine import Machine
from profiler.engines.registry import ENGINES
from profiler.facts.measurements import COMPILED, PADDING_MASK, UNQUANTISED
from profiler.grid.cells import CellKey
from profiler.loading.request import DTYPES, ModelRequest, resolve_dtype
from profiler.measure.subject import Subject
from profiler.quant.formats import can_quantise
from profiler.quant.registry import Quant, tried_formats

_COMPILING_S = 25.0
"""What compiling a few layers takes: of SmolLM2-135M on two cores of a Xeon one layer took 16 s and five another 8 s,
most of it in g++; with what a cache on the disk has of an earlier run a second at most."""


@dataclass(frozen=True)
class Variant:
    """One way to hold and step a model; what is None stays as the run has it."""

    name: str
    """What a reader would change, as a sentence names it."""
    dtype: torch.dtype | None = None
    quant: Quant | None = None
    experts: str | None = None
    kernel: SDPBackend | None = None
    """What `scaled_dot_product_attention` may call."""
    masked: bool = False
    """Whether a padding mask is handed over, as for prompts of unequal lengths."""
    engine: str | None = None
    threads: int | None = None

    @property
    def holds_alike(self) -> bool:
        """Whether the model is held as it is, and only stepped in another way."""
        return (self.dtype, self.quant, self.experts) == (None, None, None)

    @property
    def compiled(self) -> bool:
        """Whether its decode steps are code of their own, which runs none of the modules' Python."""
        return self.engine is not None and not ENGINES[self.engine].hookable

    @property
    def preparing_s(self) -> float:
        """Seconds to expect before its first step. Nothing interrupts a compiler: they are no bound."""
        return _COMPILING_S if self.compiled else 0.0

    def corners(self, keys: Sequence[CellKey]) -> Sequence[CellKey]:
        """The cells of `keys` that it is tried at.

        Code is compiled for every shape, and prefills stay as they are: the first decode step stands for all.
        """
        return [key for key in keys if key.phase == "decode"][:1] if self.compiled else keys


def variants_of(subject: Subject, compiling: bool = False) -> list[Variant]:
    """Return the variants that this machine has, the most promising first; with little time the last ones are left out.

    `compiling` adds torch.compile on a CPU; on CUDA, graphs save the host's share without a compiler.
    """
    dtypes, quants = _dtypes(subject), _quants(subject)
    # A quantised model was quantised for a reason, mostly memory: another format comes before none.
    found = [*dtypes[:1], *quants[:3]] if subject.request.quant == "none" else [*quants[:3], *dtypes[:1]]
    for variants in VARIANTS:
        found += [variant for variant in variants(subject) if compiling or not variant.compiled]
    return [*found, *dtypes[1:], *quants[3:]]


def _dtypes(subject: Subject) -> list[Variant]:
    request = subject.request
    dense = "" if request.quant == "none" else UNQUANTISED
    plain = [
        Variant(dense + name, dtype, "none") for name, dtype in DTYPES.items() if _multiplies(dtype, subject.machine)
    ]
    found = [form for form in plain if (form.dtype, form.quant) != (request.dtype, request.quant)]
    return sorted(found, key=lambda form: form.dtype is not torch.bfloat16)


def _quants(subject: Subject) -> list[Variant]:
    request = subject.request
    return [
        Variant(item.name, _dtype_of(item.name, request), item.name)
        for item in tried_formats()
        if can_quantise(item.name) and item.name != request.quant
    ]


def _engines(subject: Subject) -> Iterator[Variant]:
    if next(iter(subject.engines)) == "eager":
        yield Variant("a static cache", engine="static")
        if "compile" not in subject.engines and not subject.machine.is_cuda:
            yield Variant(COMPILED, engine="compile")


def _experts(subject: Subject) -> Iterator[Variant]:
    for name in ("grouped_mm", "batched_mm", "eager"):
        if subject.experts and name != subject.experts:
            yield Variant(f"{name} experts", experts=name)


def _attention(subject: Subject) -> Iterator[Variant]:
    """Attention kernels behind `scaled_dot_product_attention` that this device has, except for those of the run.

    A padding mask is tried with and without them; CUDA's flash kernel takes none.
    """
    config = subject.loaded.config.get_text_config()
    names = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
    if subject.machine.is_cuda:
        names |= {"memory-efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    ran = {path.kernel for path in subject.paths.values()}
    has_choice = getattr(config, "_attn_implementation", None) == "sdpa"
    kernels = {name: kernel for name, kernel in names.items() if has_choice and name not in ran}
    for name, kernel in kernels.items():
        yield Variant(f"{name} attention", kernel=kernel)
    yield Variant(PADDING_MASK, masked=True)
    for name, kernel in kernels.items():
        if kernel is not SDPBackend.FLASH_ATTENTION or not subject.machine.is_cuda:
            yield Variant(f"{PADDING_MASK} and {name} attention", kernel=kernel, masked=True)


def _threads(subject: Subject) -> Iterator[Variant]:
    threads = torch.get_num_threads()
    if not subject.machine.is_cuda and threads > 1:
        yield Variant(f"{threads // 2} of {threads} threads", threads=threads // 2)


VARIANTS: list[Callable[[Subject], Iterable[Variant]]] = [_engines, _experts, _attention, _threads]
"""Each returns the variants of one kind that a model on a machine has; registries give those of dtypes and formats."""


def _multiplies(dtype: torch.dtype, machine: Machine) -> bool:
    """Whether a dtype is worth a trial on a device: every one on a CPU, 16 bits that it has units for on CUDA."""
    if not machine.is_cuda:
        return True
    return dtype is torch.float16 or (dtype is torch.bfloat16 and machine.info.capability >= (8, 0))


def _dtype_of(quant: Quant, request: ModelRequest) -> torch.dtype:
    return resolve_dtype("auto", quant, request.device, None) if request.dtype is torch.float32 else request.dtype
