"""Checks of attention: the kernels that prefill and decode use, and the cost of a new KV length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from profiler.checks.installation import CheckResult
from profiler.facts.measurements import COMPILED, REPEATED_HEADS
from profiler.judge.how_to import how_to
from profiler.units import duration

if TYPE_CHECKING:
    from profiler.device.machine import Machine

_QUERY_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
"""Query heads, KV heads and head width of Mistral-7B and Llama-3.1-8B."""
_PROMPT = 512
_LENGTHS = range(600, 606)
"""KV lengths that are new in this process, in the order of a decode loop."""
_COSTLY = 10.0
"""A new length is reported if its first call takes this many times as long as the second."""


def attention(machine: Machine) -> CheckResult:
    """Report the kernels of `scaled_dot_product_attention` in prefill and decode, with and without a mask."""
    from profiler.facts.step import UNFUSED_KERNEL

    plain, masked = (
        [_kernel(machine, query=query, masked=with_mask) for query in (_PROMPT, 1)] for with_mask in (False, True)
    )
    words = f"{_phases(plain)}; with a mask {_phases(masked)}" if plain != masked else _phases(plain)
    words = f"kernel {words}"
    if UNFUSED_KERNEL not in (*plain, *masked):
        return CheckResult("attention", True, words)
    words += f"; {UNFUSED_KERNEL} copies K and V for every head and writes its scores to memory"
    if plain[1] == UNFUSED_KERNEL != masked[1]:
        ways = " or, in decode, ".join(how_to(change, on_gpu=True).line for change in (REPEATED_HEADS, COMPILED))
        words += f"; avoid it by {ways}"
    elif UNFUSED_KERNEL in masked:
        words += ": a newer torch may have a kernel for this GPU"
    return CheckResult("attention", True, words, slow=True)


def new_lengths(machine: Machine) -> CheckResult:
    """Compare the first attention call at a KV length with the second.

    cuDNN builds a plan for every new shape (ATen/native/cudnn/MHA.cpp). torch prefers cuDNN on Hopper and Blackwell
    since 2.11.
    """
    import torch
    import torch.nn.functional as F

    from profiler.measure.new_lengths import first_and_second_s

    name, dtype = "KV lengths", getattr(torch, machine.info.sixteen_bit_dtype)

    def attention_at(length: int) -> Callable[[], object]:
        query = torch.zeros(1, _QUERY_HEADS, 1, _HEAD_DIM, device=machine.device, dtype=dtype)
        key, value = torch.zeros(2, 1, _KV_HEADS, length, _HEAD_DIM, device=machine.device, dtype=dtype)
        return partial(F.scaled_dot_product_attention, query, key, value, enable_gqa=True)

    with torch.inference_mode():  # as in a run
        first_s, second_s = first_and_second_s(machine, attention_at, _LENGTHS)
    if first_s <= _COSTLY * second_s:
        return CheckResult(name, True, f"a new KV length costs nothing extra ({duration(second_s)} per call)")
    words = f"each new KV length costs about {duration(first_s - second_s)} once, and {duration(second_s)} after that"
    if _kernel(machine, query=1, masked=False) == "cudnn":
        words += (
            ": cuDNN builds a plan for each; torch.backends.cuda.enable_cudnn_sdp(False) needs none, and --engine"
            " static has one length"
        )
    return CheckResult(name, True, words, slow=True)


def _kernel(machine: Machine, *, query: int, masked: bool) -> str:
    """Return the kernel of a grouped attention with `query` new tokens in 16 bits."""
    import torch

    from profiler.counting.attention import AttentionCore
    from profiler.counting.attention_kernel import sdpa_kernel

    dtype = getattr(torch, machine.info.sixteen_bit_dtype)
    core = AttentionCore(
        "core", "attention", 1, dtype, _QUERY_HEADS, _KV_HEADS, _HEAD_DIM, _HEAD_DIM, itemsize=dtype.itemsize
    )
    return sdpa_kernel(core, machine.device, dtype, query=query, keys=_PROMPT, masked=masked)


def _phases(kernels: Sequence[str]) -> str:
    """Return text such as `flash` or `math in prefill, flash in decode`."""
    prefill, decode = kernels
    return prefill if prefill == decode else f"{prefill} in prefill, {decode} in decode"
