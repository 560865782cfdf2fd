"""Checks of a GPU: attention kernels, the cost of a new KV length, and matrix products. Each leaves no state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from profiler.checks.installation import Found
from profiler.device.device import compute_capability
from profiler.errors import first_line
from profiler.facts.measurements import COMPILED, REPEATED_HEADS
from profiler.judge.how_to import how_to
from profiler.units import duration

if TYPE_CHECKING:
    import torch

    from profiler.device.machine import Machine

_SIDE = 64
"""Rows and columns of the operands: `torch._int_mm` needs over 16 rows, and `torch._scaled_mm` multiples of 16."""
_QUERY_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
"""Query heads, KV heads and head width of Mistral-7B and Llama-3.1-8B."""
_PROMPT = 512
_LENGTHS = range(600, 606)
"""KV lengths that are new in this process, in the order of a decode loop."""
_COSTLY = 10.0
"""A new length is reported if its first call takes this many times as long as the second."""


def attention(machine: Machine) -> Found:
    """Report the kernels of `scaled_dot_product_attention` in prefill and decode, with and without a mask."""
    from profiler.facts.step import UNFUSED_KERNEL

    plain, masked = (
        [_kernel(machine, query=query, masked=with_mask) for query in (_PROMPT, 1)] for with_mask in (False, True)
    )
    words = f"{_phases(plain)}; with a mask {_phases(masked)}" if plain != masked else _phases(plain)
    words = f"kernel {words}"
    if UNFUSED_KERNEL not in (*plain, *masked):
        return True, words
    words += f"; {UNFUSED_KERNEL} copies K and V for every head and writes its scores to memory"
    if plain[1] == UNFUSED_KERNEL != masked[1]:
        ways = " or, in decode, ".join(how_to(change, on_gpu=True).line for change in (REPEATED_HEADS, COMPILED))
        words += f"; avoid it by {ways}"
    elif UNFUSED_KERNEL in masked:
        words += ": a newer torch may have a kernel for this GPU"
    return True, words, True


def new_lengths(machine: Machine) -> Found:
    """Compare the first attention call at a KV length with the second.

    cuDNN builds a plan for every new shape (ATen/native/cudnn/MHA.cpp). torch prefers cuDNN on Hopper and Blackwell
    since 2.11.
    """
    import torch
    import torch.nn.functional as F

    from profiler.device.clock import first_and_second_s

    dtype = getattr(torch, machine.info.sixteen_bit_dtype)

    def attention_at(length: int) -> Callable[[], object]:
        query = torch.zeros(1, _QUERY_HEADS, 1, _HEAD_DIM, device=machine.device, dtype=dtype)
        key, value = torch.zeros(2, 1, _KV_HEADS, length, _HEAD_DIM, device=machine.device, dtype=dtype)
        return partial(F.scaled_dot_product_attention, query, key, value, enable_gqa=True)

    with torch.inference_mode():  # as in a run
        first_s, second_s = first_and_second_s(machine.clock, attention_at, _LENGTHS)
    if first_s <= _COSTLY * second_s:
        return True, f"a new KV length costs nothing extra ({duration(second_s)} per call)"
    words = f"each new KV length costs about {duration(first_s - second_s)} once, and {duration(second_s)} after that"
    if _kernel(machine, query=1, masked=False) == "cudnn":
        words += (
            ": cuDNN builds a plan for each; torch.backends.cuda.enable_cudnn_sdp(False) needs none, and --engine"
            " static has one length"
        )
    return True, words, True


def _kernel(machine: Machine, *, query: int, masked: bool) -> str:
    """Return the kernel of a grouped attention with `query` new tokens in 16 bits."""
    import torch

    from profiler.counting.attention import AttentionCore
    from profiler.counting.attention_kernel import sdpa_kernel

    dtype = getattr(torch, machine.info.sixteen_bit_dtype)
    core = AttentionCore("core", dtype, _QUERY_HEADS, _KV_HEADS, _HEAD_DIM, _HEAD_DIM)
    return sdpa_kernel(core, machine.device, dtype, query=query, keys=_PROMPT, masked=masked)


def _phases(kernels: Sequence[str]) -> str:
    """Return text such as `flash` or `math in prefill, flash in decode`."""
    prefill, decode = kernels
    return prefill if prefill == decode else f"{prefill} in prefill, {decode} in decode"


@dataclass(frozen=True)
class OptionalProduct:
    """A matrix product that only some GPUs support."""

    name: str
    made: Callable[[torch.device], Callable[[], torch.Tensor]]
    """Makes the operands on a device, and returns a call that multiplies them; every element of the product is 1."""
    capability: tuple[int, int]
    """The lowest compute capability for which torch has a kernel."""
    works: str
    fails: str
    """The consequence for a run if the product fails."""
    older: str
    """The consequence on a GPU below `capability`."""


def _float8(device: torch.device, *, by_row: bool) -> Callable[[], torch.Tensor]:
    """The call of torchao's fp8 linears and of the roof of fp8."""
    import torch

    from profiler.roofs.gemm import float8_product

    left = _first_column(device, torch.float32).to(torch.float8_e4m3fn)
    right = torch.ones(_SIDE, _SIDE, device=device).to(torch.float8_e4m3fn).t()
    return float8_product(left, right, by_row=by_row)


def _int8(device: torch.device) -> Callable[[], torch.Tensor]:
    import torch

    left = _first_column(device, torch.int8)
    right = torch.ones(_SIDE, _SIDE, device=device, dtype=torch.int8).t()
    return lambda: torch._int_mm(left, right)


def _grouped(device: torch.device) -> Callable[[], torch.Tensor]:
    """Two experts with half of the rows each, called as in transformers' mixtures of experts."""
    import torch

    left = _first_column(device, torch.bfloat16)
    right = torch.ones(2, _SIDE, _SIDE, device=device, dtype=torch.bfloat16)
    ends = torch.tensor([_SIDE // 2, _SIDE], device=device, dtype=torch.int32)
    return lambda: torch._grouped_mm(left, right, offs=ends)


def _first_column(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a square matrix of zeros with a first column of ones; times a matrix of ones it is a matrix of ones."""
    import torch

    square = torch.zeros(_SIDE, _SIDE, device=device, dtype=dtype)
    square[:, 0] = 1
    return square


PRODUCTS = (
    OptionalProduct(
        "fp8 by row",
        lambda device: _float8(device, by_row=True),
        (8, 9),
        "--quant fp8 multiplies in fp8",
        "--quant fp8 cannot run here and fp8 has no roof; use --quant int8wo",
        "no fp8 units: --quant fp8 multiplies in 16 bits",
    ),
    OptionalProduct(
        "fp8 by tensor",
        lambda device: _float8(device, by_row=False),
        (8, 9),
        "checkpoints with one fp8 scale for each tensor multiply in fp8",
        "checkpoints with one fp8 scale for each tensor cannot run here",
        "no fp8 units",
    ),
    OptionalProduct(
        "int8 products",
        _int8,
        (7, 5),
        "int8 has a roof here",
        "int8 has no roof here",
        "no int8 units: int8 has no roof here",
    ),
    OptionalProduct(
        "grouped products",
        _grouped,
        (8, 0),
        "mixtures of experts run all experts in one call",
        "mixtures of experts run one expert after the other, and wait for the GPU in every layer",
        "not on this GPU: mixtures of experts run one expert after the other, and wait for the GPU in every layer",
    ),
)


def product(machine: Machine, kind: OptionalProduct) -> Found:
    """Check that a matrix product runs on this GPU, gives the right values, and does not block the host."""
    try:
        call = kind.made(machine.device)
        wrong = bool((call() != 1).any())
    except Exception as error:
        if compute_capability(machine.device) < kind.capability:
            return None, kind.older
        return False, f"{first_line(error)}; {kind.fails}"
    if wrong:
        return False, f"gives wrong values: {kind.fails}"
    if machine.waits(call):  # without a kernel for the GPU, `_grouped_mm` reads the groups' ends (GroupedMMUtils.h)
        return True, "works, but waits for the GPU in every call: no --engine graph", True
    return True, kind.works
