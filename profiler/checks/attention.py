"""Checks of attention: which kernels prefill and decode take, and what a new KV length costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from profiler.checks.installation import CheckResult
from profiler.device.device import compute_capability
from profiler.units import duration

if TYPE_CHECKING:
    import torch

    from profiler.device.machine import Machine

_QUERY_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
"""Query heads, KV heads and width of Mistral-7B and Llama-3.1-8B."""
_PROMPT = 512
_LENGTHS = range(601, 606)
"""KV lengths that nothing has asked for before in this process, one after the other as in a decode loop."""
_COSTLY = 10.0
"""A new length is named where it takes this many times as long as the same length again."""


def half_of(device: torch.device) -> torch.dtype:
    """The 16-bit dtype of a device: bfloat16 but for cards without units for it."""
    import torch

    return torch.float16 if device.type == "cuda" and compute_capability(device) < (8, 0) else torch.bfloat16


def attention(machine: Machine) -> CheckResult:
    """The kernels behind `scaled_dot_product_attention` in prefill and decode, with a mask and without one."""
    from profiler.facts.step import UNFUSED_KERNEL

    plain, masked = (
        [_kernel(machine, query=query, masked=with_mask) for query in (_PROMPT, 1)] for with_mask in (False, True)
    )
    words = f"{_phases(plain)}; with a mask {_phases(masked)}" if plain != masked else _phases(plain)
    if UNFUSED_KERNEL not in (*plain, *masked):
        return CheckResult("attention", True, words)
    words += f"; {UNFUSED_KERNEL} copies K and V for every head and writes its scores to memory"
    if plain[1] == UNFUSED_KERNEL != masked[1]:
        words += ": --engine static decodes with a mask and avoids it"
    elif UNFUSED_KERNEL in masked:
        words += ": a newer torch may have a kernel for this card"
    return CheckResult("attention", True, words, slow=True)


def new_lengths(machine: Machine) -> CheckResult:
    """What the first attention call at a KV length costs, next to the same call again.

    cuDNN builds a plan for every shape that it has not met (ATen/native/cudnn/MHA.cpp); torch prefers cuDNN on Hopper
    and Blackwell from 2.11 on.
    """
    import torch

    name = "KV lengths"
    with torch.inference_mode():  # as a run steps its model
        _, *pairs = [_first_and_again(machine, length) for length in (_LENGTHS.start - 1, *_LENGTHS)]
    first_s, again_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    if first_s <= _COSTLY * again_s:
        return CheckResult(name, True, f"a new KV length costs nothing extra ({duration(again_s)} a call)")
    words = f"each new KV length costs about {duration(first_s - again_s)} once, and {duration(again_s)} after that"
    if _kernel(machine, query=1, masked=False) == "cudnn":
        words += ": cuDNN builds a plan for each; --engine static has one length"
    return CheckResult(name, True, words, slow=True)


def _kernel(machine: Machine, *, query: int, masked: bool) -> str:
    """The kernel of a grouped attention of so many new tokens in 16 bits."""
    from profiler.counting.attention import AttentionCore
    from profiler.counting.attention_kernel import sdpa_kernel

    dtype = half_of(machine.device)
    core = AttentionCore(
        "core", "attention", 1, dtype, _QUERY_HEADS, _KV_HEADS, _HEAD_DIM, _HEAD_DIM, itemsize=dtype.itemsize
    )
    return sdpa_kernel(core, machine.device, dtype, query=query, keys=_PROMPT, masked=masked)


def _phases(kernels: Sequence[str]) -> str:
    """`flash`; `math in prefill, flash in decode`."""
    prefill, decode = kernels
    return prefill if prefill == decode else f"{prefill} in prefill, {decode} in decode"


def _first_and_again(machine: Machine, length: int) -> tuple[float, float]:
    """Seconds of a decode step's attention at a KV length, the first time and the second."""
    import torch
    import torch.nn.functional as F

    dtype = half_of(machine.device)
    query = torch.zeros(1, _QUERY_HEADS, 1, _HEAD_DIM, device=machine.device, dtype=dtype)
    key, value = torch.zeros(2, 1, _KV_HEADS, length, _HEAD_DIM, device=machine.device, dtype=dtype)

    def seconds() -> float:
        machine.clock.synchronize()
        start_s = machine.now_s()
        F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        machine.clock.synchronize()
        return machine.now_s() - start_s

    return seconds(), seconds()
