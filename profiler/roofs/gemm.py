"""The compute ceiling of each dtype (matmuls), and the bandwidth of a decode step's matrix-vector product."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from profiler.device.clock import time_calls
from profiler.device.device import compute_capability
from profiler.device.machine import Machine
from profiler.facts.ceilings import TFLOAT32, Ceiling
from profiler.patching import switched
from profiler.roofs.sampler import LEAST_S, ceiling_of, sample, sample_on_device

_GEMM_SMALLEST = 256
_GEMM_LARGEST = 8192
# A call this long keeps every unit busy, and its start and end are negligible.
_GEMM_ENOUGH_S = {"cpu": 50e-3, "cuda": 5e-3}
# An H100 at its power limit of 700 W lowers its clock within 10 to 35 ms: from 780 to between 660 and 720 TFLOP/s.
_BURST_S, _SETTLE_S, _REST_S = 0.02, 0.1, 0.05
_GEMV_SHAPE = (4096, 4096)
_FLOAT8 = "float8_e4m3fn"

SquareMatmul = tuple[Callable[[], object], str]
"""A call that multiplies two square matrices, and its method: the size, and how it differs from a plain matmul."""


def measure_gemv(machine: Machine, dtype: str, nbytes: int, budget_s: float) -> Ceiling:
    """Return the bytes/s of a one-row linear layer, which rotates through `nbytes` of weights, past the cache."""
    device, (outs, ins), start_s = machine.device, _GEMV_SHAPE, machine.now_s()
    kind = getattr(torch, dtype)
    count = max(3, nbytes // (outs * ins * kind.itemsize))
    first = torch.randn(outs, ins, device=device, dtype=kind)
    weights = [first, *(first.clone() for _ in range(count - 1))]
    x = torch.randn(1, ins, device=device, dtype=kind)

    def one_pass() -> None:
        for weight in weights:
            F.linear(x, weight)

    nbytes_pass = count * outs * ins * kind.itemsize
    left_s = budget_s - (machine.now_s() - start_s)  # making the weights takes time, too
    return ceiling_of(nbytes_pass, sample_on_device(one_pass, machine, left_s), f"{count} of {outs}x{ins}")


def measure_gemm(machine: Machine, dtype: str, budget_s: float) -> Ceiling:
    """Return the highest FLOP/s over several sizes of square matmuls, laid out like a linear layer: x @ W.T.

    Sizes double until one call saturates the device, or four calls of eight times the work would not fit in the time.
    The last one has all the remaining time, since a GPU under load lowers its clock.
    """
    enough_s = _GEMM_ENOUGH_S[machine.device.type]
    deadline_s, ceilings = machine.now_s() + budget_s, list[Ceiling]()
    size = _GEMM_SMALLEST
    while True:
        matmul = square_matmul(machine.device, dtype, size)
        once_s = min(time_calls(matmul[0], machine.clock, 2))
        left_s = max(deadline_s - machine.now_s(), 0)
        is_last = once_s >= enough_s or size >= _GEMM_LARGEST or 4 * 8 * once_s > left_s
        # Smaller sizes only lead up to those that matter, so they get a small share of the time.
        if is_last or once_s >= enough_s / 8:
            ceilings.append(sampled_matmul(matmul, machine, size, left_s if is_last else left_s / 3))
        if is_last:
            return max(ceilings, key=lambda ceiling: ceiling.per_s)
        size *= 2


def sampled_matmul(matmul: SquareMatmul, machine: Machine, size: int, budget_s: float) -> Ceiling:
    """Return the FLOP/s of a matmul of squares, at a GPU's clock after 0.1 s of it; after a rest comes the burst."""
    (multiply, method), work, least_s, burst_per_s = matmul, 2.0 * size**3, LEAST_S, None
    if machine.is_cuda:
        least_s = math.inf
        time.sleep(_REST_S)
        burst_per_s = work / statistics.median(sample(multiply, machine, _BURST_S, least_s=least_s))
        sample(multiply, machine, _SETTLE_S - _BURST_S, least_s=least_s)
        budget_s -= _REST_S + _SETTLE_S
    seconds = sample(multiply, machine, budget_s, least_s=least_s)
    return replace(ceiling_of(work, seconds, method), burst_per_s=burst_per_s)


def measurable_dtypes(device: torch.device) -> list[str]:
    """Return the dtypes whose matmuls this device can run; the measured rate shows which are emulated."""
    dtypes = ["float32", "bfloat16", "float16", "int8"]
    if device.type == "cuda":
        capability = compute_capability(device)
        if capability >= (8, 0):
            dtypes.append(TFLOAT32)
        if capability >= (8, 9):
            dtypes.append(_FLOAT8)
        if capability < (7, 5):
            dtypes.remove("int8")
    return dtypes


def square_size(ceiling: Ceiling) -> int:
    """Return the side of the squares with which `measure_gemm` reached this ceiling."""
    return int(ceiling.method.split("x")[0])


def remeasure_gemm(machine: Machine, dtype: str, ceiling: Ceiling, budget_s: float) -> Ceiling:
    """Return the FLOP/s that the matmul of a ceiling by `measure_gemm` reaches now."""
    size = square_size(ceiling)
    return sampled_matmul(square_matmul(machine.device, dtype, size), machine, size, budget_s)


def square_matmul(device: torch.device, dtype: str, size: int) -> SquareMatmul:
    """Return a matmul of two random squares of this dtype. Raises torch's error if the device has none."""
    method = f"{size}x{size}x{size}"
    if dtype == TFLOAT32:
        full, _ = square_matmul(device, "float32", size)
        return partial(_with_tf32, full), method
    if dtype == _FLOAT8:
        left, right = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        per_row = float8_matmul(left, right.t(), by_row=True)
        try:
            per_row()
        except RuntimeError:
            # torch 2.10 on sm_120 reports CUBLAS_STATUS_NOT_SUPPORTED per row, and multiplies per tensor
            # (pytorch/pytorch#192707).
            method += ", one scale per tensor: scales per row failed"
            return float8_matmul(left, right.t(), by_row=False), method
        return per_row, method
    if dtype == "int8":
        a, b = (torch.randint(-127, 127, (size, size), device=device, dtype=torch.int8) for _ in range(2))
        return partial(torch._int_mm, a, b.t()), method
    x, weight = (torch.randn(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    return partial(F.linear, x, weight), method


def float8_matmul(left: torch.Tensor, right: torch.Tensor, *, by_row: bool) -> Callable[[], torch.Tensor]:
    """Return torchao's float8 matmul (0.18, `addmm_float8_unwrapped_inference`): a scale per row, or per tensor."""
    rows, columns = (left.shape[0], right.shape[1]) if by_row else (1, 1)
    scale_a, scale_b = torch.ones(rows, 1, device=left.device), torch.ones(1, columns, device=left.device)
    options = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return partial(torch._scaled_mm, left, right, **options)


def _with_tf32(call: Callable[[], object]) -> object:
    settings = torch.backends.cuda.matmul
    with switched(partial(setattr, settings, "allow_tf32"), True, settings.allow_tf32):
        return call()
