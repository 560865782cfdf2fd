"""GPU datasheets: dense peaks, bandwidth and memory; one row of gpus.csv per GPU and variant."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from typing import Annotated

from pydantic import BeforeValidator

from profiler.data import rows_of, texts_of
from profiler.data.free_memory import idle_room_bytes
from profiler.errors import RequestError, near_misses

# A card reports up to 12 % less memory than its datasheet (ECC, firmware, the driver's share).
_MEMORY_TOLERANCE = 0.12

_MOST_NAMES = 8
_MEMORY = re.compile(r"\d+gb")
_WITH_MEMORY = re.compile(r"(.+?)[\s_(-]*(\d+)\s?gb\)?", re.IGNORECASE)
_COMMON_WORDS = frozenset({"nvidia", "tesla", "geforce", "amd", "instinct", "radeon", "apple", "intel", "generation"})
# After the name of a product they make it another one.
_OTHER_PRODUCT = frozenset({"ti", "super", "xt", "xtx", "gre", "d", "ada", "max", "max-q", "pro", "ultra", "laptop"})
# Of a Mac with little memory its GPU may take less (`usable_source` of gpus.csv).
_LITTLE_GIB, _SHARE_OF_LITTLE = 32, 2 / 3

Known = Annotated[float | None, BeforeValidator(lambda cell: cell or None)]
"""A number, or None for an empty cell."""

_Listed = BeforeValidator(lambda cell: [part for part in cell.split(";") if part])

Flag = Annotated[bool, BeforeValidator(lambda cell: cell == "true")]
"""Whether a cell says `true`."""


@dataclass(frozen=True)
class Datasheet:
    """One GPU as its maker describes it. All peaks are dense, without 2:4 sparsity."""

    gpu: str
    vendor: str
    year: int
    compute_capability: str
    sm_count: int
    rated_clock_hz: float
    fp16_flops_per_clock_per_sm: int
    memory_bytes: int
    """Memory by its maker's datasheet."""
    usable_bytes: int
    """Memory that the driver reports to a program (deviceQuery, or torch), less than the datasheet's."""
    memory_sizes_gib: Annotated[tuple[int, ...], _Listed]
    """The sizes of the computer's memory that it may share; `memory_bytes` is the largest. Else empty."""
    bandwidth_bytes_per_s: float
    l2_bytes: Known
    tdp_w: float
    peak_fp64_flops_per_s: Known
    peak_fp32_flops_per_s: Known
    peak_tf32_flops_per_s: Known
    peak_fp16_flops_per_s: Known
    peak_bf16_flops_per_s: Known
    peak_fp8_flops_per_s: Known
    peak_int8_ops_per_s: Known
    peak_fp4_flops_per_s: Known
    link_bytes_per_s: Known
    link: str
    published_link: str
    """The row of links.csv for the first link of `link`; empty without a published figure."""
    rented: Flag
    """Whether it is among the GPUs that are rented most, which `run` names next to its own."""
    small_host: Flag
    """Whether it is mostly rented with a few cores of an older server (`predict.published_efficiency`)."""
    sustained_flops_per_s: Known
    """What a healthy card holds in large matmuls of `sustained_dtype` once it has settled at its power limit, `tdp_w`.

    In its first tens of milliseconds a card may be much faster: an H100 SXM reaches 780 TFLOP/s, and holds 680."""
    sustained_copy_bytes_per_s: Known
    """A device copy (read plus write) of a healthy card."""
    sustained_source: str
    """Source of both."""
    nvml_name: str
    """The driver's names for the card, separated by |."""
    source: str
    usable_source: str
    """Source of `usable_bytes`. nvidia-smi also counts memory that the driver keeps, about 500 MiB."""
    uncertain: Annotated[tuple[str, ...], _Listed]
    """Columns on which sources disagree, or that were derived from other figures."""
    note: str

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """Return the dense peak for the name of a torch dtype; None if this card has no unit for it."""
        return getattr(self, _PEAK_COLUMN[dtype]) if dtype in _PEAK_COLUMN else None

    @property
    def room_bytes(self) -> int:
        """The bytes that a model, its KV cache and its workspace may take of this GPU (`data.free_memory`)."""
        return idle_room_bytes("cuda", self.usable_bytes)

    @property
    def fuses_grouped_heads(self) -> bool:
        """Whether torch has a fused attention kernel for grouped heads in 16 bits: from compute capability 8.0 on.

        Older GPUs have the memory-efficient kernel only, which refuses grouped heads (torch 2.13, sdp_utils.cpp).
        """
        return self.vendor != "NVIDIA" or float(self.compute_capability) >= 8.0

    @property
    def sustained_dtype(self) -> str:
        """The dtype of `sustained_flops_per_s`: bfloat16 if the card has units for it, else float16."""
        return "bfloat16" if self.peak_bf16_flops_per_s else "float16"

    def ridge_flops_per_byte(self, dtype: str) -> float | None:
        """Return the FLOPs per byte above which a step of this dtype is compute-bound; None without a peak."""
        peak = self.peak_flops_per_s(dtype)
        return peak / self.bandwidth_bytes_per_s if peak else None


_PEAK_COLUMN = {
    "float64": "peak_fp64_flops_per_s",
    "float32": "peak_fp32_flops_per_s",
    "tfloat32": "peak_tf32_flops_per_s",
    "float16": "peak_fp16_flops_per_s",
    "bfloat16": "peak_bf16_flops_per_s",
    "float8_e4m3fn": "peak_fp8_flops_per_s",
    "float4_e2m1fn_x2": "peak_fp4_flops_per_s",
    "int8": "peak_int8_ops_per_s",
}
PEAK_DTYPES = tuple(_PEAK_COLUMN)
"""Names of torch dtypes that a datasheet may have a peak of."""


@cache
def gpus() -> tuple[Datasheet, ...]:
    """Return all rows of gpus.csv."""
    return rows_of("gpus.csv", Datasheet)


def called(name: str) -> list[Datasheet]:
    """Return the rows for the driver's name of a card; several if cards with different memories share it.

    The whole name must agree, except for common words such as `nvidia`: an L40S is not an L40, a 3090 Ti not a 3090.
    """
    words = _distinctive(name)
    return [gpu for gpu in gpus() if words in map(_distinctive, gpu.nvml_name.split("|"))]


def gpu_called(name: str) -> Datasheet:
    """Return the only row with this name, this driver's name, or these words in its name, in any case.

    The name of a computer that has one kind of GPU, such as DGX Spark, is that GPU's. A word may be abbreviated, but
    not within a number: T5 does not mean T5000, nor RTX 2080 the 2080 Ti. A memory size is not a name, but may follow
    one: RTX 3090 24GB, M4 Max 64GB. Words may be joined: RTX_4090, h100-sxm, rtx4090,
    7900xtx. Raises RequestError for no match or several.
    """
    if name.endswith(".json"):
        raise RequestError(f"{name}: profiles of GPUs were removed; name a GPU (`roofscope gpus` lists them).")
    rows = (
        _rows_called(name)
        or _rows_called(re.sub("[-_]", " ", name))
        or [gpu for gpu in gpus() if re.search(rf"(^|(?<!\d)(?=\d)){re.escape(_joined(name))}$", _joined(gpu.gpu))]
        or _with_memory(name)
    )
    if len(rows) == 1:
        return rows[0]
    if rows:
        names = ", ".join(gpu.gpu for gpu in rows[:_MOST_NAMES])
        more = f" or one of {len(rows) - _MOST_NAMES} others (`roofscope gpus`)" if len(rows) > _MOST_NAMES else ""
        raise RequestError(f"{name!r} may mean several GPUs. Which one: {names}{more}?")
    near = near_misses(name, [gpu.gpu for gpu in gpus()])
    raise RequestError(f"no GPU is called {name!r} in roofscope's table.{near} `roofscope gpus` lists them all.")


def _with_memory(name: str) -> list[Datasheet]:
    """The GPUs with the memory at the end of `name`, their own or one that they share with their computer.

    Raises RequestError for a size that such a computer is not sold with.
    """
    match = _WITH_MEMORY.fullmatch(name)
    if match is None:
        return []
    rows, size = _rows_called(match[1]), int(match[2])
    if len(rows) != 1 or not rows[0].memory_sizes_gib:
        return [gpu for gpu in rows if gpu.memory_bytes == size << 30]
    own = rows[0].gpu
    # One with fewer cores, which is sold with other sizes, has a row of its own.
    binned = [gpu for gpu in gpus() if re.fullmatch(rf"{re.escape(own)}( \d+-core)?", gpu.gpu)]
    gpu = next((gpu for gpu in binned if size in gpu.memory_sizes_gib), None)
    if gpu is None:
        sizes = ", ".join(map(str, sorted(size for gpu in binned for size in gpu.memory_sizes_gib)))
        raise RequestError(f"{name!r}: the memory of the {own} is one of {sizes} GB.")
    is_little = gpu.vendor == "Apple" and size <= _LITTLE_GIB
    share = _SHARE_OF_LITTLE if is_little else gpu.usable_bytes / gpu.memory_bytes
    return [replace(gpu, gpu=f"{gpu.gpu} {size}GB", memory_bytes=size << 30, usable_bytes=int(share * (size << 30)))]


def _rows_called(name: str) -> list[Datasheet]:
    """The rows of a name. Raises RequestError for one that only the name of another product continues."""
    words = _distinctive(_products().get(_distinctive(name), name))
    if rows := [gpu for gpu in gpus() if _distinctive(gpu.gpu) == words] or called(name):
        return rows
    rows = [gpu for gpu in gpus() if _has_words(gpu.gpu.lower().split(), words)]
    own = rows[0].gpu.lower().split() if len(rows) == 1 else []
    later = takewhile(lambda word: not any(_begins(word, start) for start in words), reversed(own))
    if not _OTHER_PRODUCT.isdisjoint(later):
        raise RequestError(f"no GPU is called {name!r} in roofscope's table. Did you mean {rows[0].gpu}?")
    return rows


@cache
def _products() -> dict[tuple[str, ...], str]:
    """The GPU in each computer that is sold under another name, by the words of that name."""
    return {_distinctive(product): gpu for product, gpu in texts_of("product_names.csv").items()}


def find(name: str, memory_bytes: int, sm_count: int | None = None) -> Datasheet | None:
    """Return the row for a driver's name, a memory size and a number of SMs; None if it is not in the table.

    Among rows with one name, the nearest memory wins. A slice of a card is not the card: its name or its SMs differ.
    """
    rows = [
        gpu
        for gpu in called(name)
        if abs(memory_bytes / gpu.memory_bytes - 1) <= _MEMORY_TOLERANCE and sm_count in (None, gpu.sm_count)
    ]
    return min(rows, key=lambda gpu: abs(memory_bytes - gpu.memory_bytes), default=None)


def _joined(name: str) -> str:
    return re.sub("[-_ ]", "", name.lower())


def _distinctive(name: str) -> tuple[str, ...]:
    name = name.lower().split(" w/ ")[0]  # a processor and its graphics
    return tuple(word for word in name.split() if word not in _COMMON_WORDS)


def _begins(text: str, start: str) -> bool:
    """Whether `text` begins with `start`, without a number cut in two."""
    return text.startswith(start) and not (start[-1:].isdigit() and text[len(start) :][:1].isdigit())


def _has_words(words: Sequence[str], starts: Sequence[str]) -> bool:
    """Whether each start begins one of `words`, and one of them a word other than a memory size."""
    begun = [(word, start) for word in words for start in starts if _begins(word, start)]
    return {start for _, start in begun} == set(starts) and not all(_MEMORY.fullmatch(word) for word, _ in begun)
