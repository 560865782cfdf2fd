"""The changes that a user can make: how each is written, what it sets, where it works, and what it costs once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from profiler.facts.change_ids import ChangeId
from profiler.quant.registry import FORMATS, tried_formats


@dataclass(frozen=True)
class Change:
    """A change as its user writes it. A part of the line that is empty is not needed."""

    id: ChangeId
    phrase: str
    """What it changes to, as a sentence names it."""
    loading: str = ""
    """Arguments of `from_pretrained`."""
    statement: str = ""
    """A statement about the loaded `model`, or about torch."""
    calling: str = ""
    """Arguments of `model.generate`."""
    undoing: str = ""
    """The statement that undoes `statement`; empty if that assigns to an attribute, which is set back."""
    shell: str = ""
    """What stands before the command `python`."""
    value: str = ""
    """Which of a kind it is: a format or a dtype by its name, a number of threads."""
    dtype: str = ""
    """The dtype that it loads; empty: as before."""
    preparing_s: float = 0.0
    """Expected seconds of compiling or capturing."""
    new_lengths: bool = False
    """Whether it saves at KV lengths that are new to the process, and so is tried at such."""

    @property
    def line(self) -> str:
        """The line to write; empty for a change that transformers has no line for."""
        parts = (
            self.shell and f"{self.shell} python ...",
            self.loading and f"from_pretrained(..., {self.loading})",
            self.statement,
            self.calling and f"model.generate(..., {self.calling})",
        )
        return "; ".join(filter(None, parts))

    @property
    def loads(self) -> bool:
        """Whether another model is loaded for it."""
        return bool(self.loading)


@dataclass(frozen=True)
class Circumstances:
    """What decides which changes a run can try, and how they are written."""

    on_gpu: bool
    dtype: str
    quant: str = "none"
    capability: float = 0.0
    """CUDA compute capability; 0 on a CPU."""
    attention: str = "sdpa"
    kernel: str = ""
    """The kernel that `scaled_dot_product_attention` calls in a decode step."""
    grouped_heads: bool = False
    windowed: bool = False
    """Whether a layer attends to a window of tokens."""
    experts: str | None = None
    threads: int = 1
    cores: int = 1
    """Physical cores that this process may use."""
    layers: int = 0
    packs: bool = True
    """Whether the loader can quantise the weights; it does not quantise those of a GGUF file."""
    int4_group: int | None = None
    """The largest group of torchao's int4 that divides every layer's inputs; None if there is none."""
    quantised_cache: bool = True
    """Whether transformers can quantise this model's cache."""

    @property
    def compiles(self) -> bool:
        """Whether `generate` compiles the step of a static cache (`_valid_auto_compile_criteria` of transformers)."""
        return self.on_gpu and (self.quant not in FORMATS or FORMATS[self.quant].compileable)

    @property
    def sixteen_bits(self) -> tuple[str, ...]:
        """Of BF16 and FP16, those that the device has units for, or on a CPU may have, the preferred one first."""
        return ("float16",) if self.on_gpu and self.capability < 8 else ("bfloat16", "float16")


_COMPILING_ON_GPU_S, _COMPILING_A_LAYER_S = 20.0, 1.25
"""Seconds to compile a model on a GPU, and for each of its layers. Mistral-7B took 50 s on an H100, 50 to 75 on an
H200."""

_STATIC = 'cache_implementation="static"'


def dtype_change(name: str, quant: str = "none") -> Change:
    """Return the change to unquantised weights of a dtype, from those of the format `quant`."""
    loading = f"dtype=torch.{name}" + ("" if quant == "none" else ", quantization_config=None")
    return Change(ChangeId.DTYPE, f"{name} weights", loading=loading, value=name, dtype=name)


def format_change(name: str, dtype: str, here: Circumstances) -> Change:
    """Return the change to a format with matmuls in a dtype; bitsandbytes' default is float32 in any model."""
    item = FORMATS[name]
    written = (not here.on_gpu and item.written_on_cpu) or item.written
    config = f"quantization_config={written.format(dtype=dtype, group=here.int4_group)}"
    loading = config if dtype == here.dtype else f"dtype=torch.{dtype}, {config}"
    return Change(ChangeId.FORMAT, f"{name} weights", loading=loading, value=name, dtype=dtype)


def _weights(here: Circumstances) -> Iterator[Change]:
    dtypes = here.sixteen_bits if here.on_gpu else ("bfloat16", "float16", "float32")
    yield from (dtype_change(name, here.quant) for name in dtypes if (name, "none") != (here.dtype, here.quant))
    if not here.packs:
        return
    dtype = here.sixteen_bits[0] if here.dtype == "float32" else here.dtype
    for item in tried_formats():
        has_kernel = not here.on_gpu or here.capability >= item.least_capability
        if item.name != here.quant and has_kernel and (item.name != "int4wo" or here.int4_group):
            yield format_change(item.name, dtype, here)


def _caches(here: Circumstances) -> Iterator[Change]:
    if here.on_gpu and not here.windowed:  # no graph replays a moving window, since the host counts its tokens
        yield Change(ChangeId.GRAPH, "one CUDA graph per step", preparing_s=1.5)
    if here.compiles:
        seconds = _COMPILING_ON_GPU_S + _COMPILING_A_LAYER_S * here.layers
        yield Change(ChangeId.COMPILED_STEP, "a compiled step on a static cache", calling=_STATIC, preparing_s=seconds)
    else:
        yield Change(ChangeId.STATIC_CACHE, "a static cache", calling=_STATIC)
    if here.compiles or not here.on_gpu:
        yield compiled_forward(here)
    if here.quantised_cache:
        calling = 'past_key_values=QuantizedCache("fp8", model.config)'
        yield Change(ChangeId.EIGHT_BIT_CACHE, "an 8-bit KV cache", calling=calling)


def compiled_forward(here: Circumstances) -> Change:
    """Return the change that compiles every forward, prefills too; on a CPU with a cache of constant size."""
    return Change(
        ChangeId.COMPILED_FORWARD,
        "torch.compile",
        statement="model.forward = torch.compile(model.forward)",
        calling="" if here.on_gpu else _STATIC,
        # Prefill and step; of a few layers on a CPU, where one layer of SmolLM2-135M took 16 s a piece.
        preparing_s=2 * (_COMPILING_ON_GPU_S + _COMPILING_A_LAYER_S * here.layers) if here.on_gpu else 40.0,
    )


def _attention(here: Circumstances) -> Iterator[Change]:
    """Attention by torch's `sdpa`; repeated heads, where only they have a fused kernel, gained 1.6 to 1.8x on a T4."""
    names = {"sdpa": ChangeId.SDPA, "eager": ChangeId.EAGER_ATTENTION}
    for name, change in names.items():
        if here.attention in names and name != here.attention:
            statement, undoing = (f'model.set_attn_implementation("{each}")' for each in (name, here.attention))
            yield Change(change, f"{name} attention", statement=statement, undoing=undoing)
    if here.attention == "sdpa" and here.on_gpu and here.grouped_heads and here.kernel == "math":
        yield REPEATED_HEADS
    if here.attention == "sdpa" and here.kernel == "cudnn":
        yield WITHOUT_CUDNN
    if here.windowed:
        yield UNWINDOWED


REPEATED_HEADS = Change(
    ChangeId.REPEATED_HEADS,
    "attention on repeated heads",
    statement="transformers.integrations.sdpa_attention.use_gqa_in_sdpa = lambda *_: False",
)
WITHOUT_CUDNN = Change(
    ChangeId.WITHOUT_CUDNN,
    "attention without cuDNN",
    statement="torch.backends.cuda.enable_cudnn_sdp(False)",
    undoing="torch.backends.cuda.enable_cudnn_sdp(True)",
    new_lengths=True,
)
UNWINDOWED = Change(
    ChangeId.UNWINDOWED, "grouped heads on a cache that does not roll", statement="model.config.sliding_window = None"
)
KEPT_PAGES = Change(
    ChangeId.KEPT_PAGES,
    "keeping freed memory",
    shell="MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_MMAP_THRESHOLD_=4294967296",
)


def _experts(here: Circumstances) -> Iterator[Change]:
    for name in ("grouped_mm", "batched_mm", "eager"):
        if here.experts and name != here.experts:
            statement, undoing = (f'model.set_experts_implementation("{each}")' for each in (name, here.experts))
            yield Change(ChangeId.EXPERTS, f"{name} experts", statement=statement, undoing=undoing, value=name)


def _threads(here: Circumstances) -> Iterator[Change]:
    if here.on_gpu:
        return
    for threads in dict.fromkeys((here.cores, here.threads // 2)):
        if 0 < threads != here.threads:
            statement, undoing = (f"torch.set_num_threads({each})" for each in (threads, here.threads))
            phrase = f"{threads} of {here.threads} threads" if threads < here.threads else f"{threads} threads"
            yield Change(ChangeId.THREADS, phrase, statement=statement, undoing=undoing, value=str(threads))


CHANGES: tuple[Callable[[Circumstances], Iterator[Change]], ...] = (_weights, _caches, _attention, _experts, _threads)
"""Functions that return the changes of one kind that work in some circumstances."""


def possible_changes(here: Circumstances) -> list[Change]:
    return [change for of_kind in CHANGES for change in of_kind(here)]
