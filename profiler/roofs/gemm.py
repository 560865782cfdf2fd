"""The compute roof of each dtype (matrix products), and the matrix-vector product of a decode step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from profiler.device.clock import time_calls
from profiler.device.device import compute_capability
from profiler.device.machine import Machine
from profiler.facts.roofs import TFLOAT32, Roof
from profiler.roofs.sampler import roof_of, sample, sample_on_device

_GEMM_SMALLEST = 256
_GEMM_LARGEST = 8192
# A call this long keeps every unit busy and makes its start and end negligible.
_GEMM_ENOUGH_S = {"cpu": 50e-3, "cuda": 5e-3}
_GEMV_SHAPE = (4096, 4096)
_FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True)
class SquareProduct:
    """A product of two squares, to be called."""

    run: Callable[[], object]
    method: str
    """Its size, and how it differs from a plain product."""

    def __call__(self) -> object:
        return self.run()


def measure_gemv(machine: Machine, dtype: str, nbytes: int, budget_s: float) -> Roof:
    """Bytes of weights a second that a linear layer of one row reads, over weights that rotate past the cache."""
    device, (outs, ins) = machine.device, _GEMV_SHAPE
    kind = getattr(torch, dtype)
    count = max(3, nbytes // (outs * ins * kind.itemsize))
    first = torch.randn(outs, ins, device=device, dtype=kind)
    weights = [first, *(first.clone() for _ in range(count - 1))]
    x = torch.randn(1, ins, device=device, dtype=kind)

    def one_pass() -> None:
        for weight in weights:
            F.linear(x, weight)

    nbytes_pass = count * outs * ins * kind.itemsize
    return roof_of(nbytes_pass, sample_on_device(one_pass, machine, budget_s), f"{count} of {outs}x{ins}")


def measure_gemm(machine: Machine, dtype: str, budget_s: float) -> Roof:
    """FLOP/s of the best of several squares on random data, laid out as a linear layer's: x @ W.T.

    Sizes double until one call takes long enough to saturate the device, or the time is spent. On CUDA the last size
    gets all of the time that is left, a second of `STAGE_BUDGET_S` if its calls are short: a card under load lowers its
    clock within a part of a second, and a long prefill runs at the clock that it then keeps.
    """
    enough_s = _GEMM_ENOUGH_S[machine.device.type]
    deadline = machine.now_s() + budget_s
    best: Roof | None = None
    size = _GEMM_SMALLEST
    while True:
        product = square_product(machine.device, dtype, size)
        product()
        [once_s] = time_calls(product, machine.clock, 1)
        done = once_s >= enough_s or size >= _GEMM_LARGEST
        # The probes on the way up only lead to the sizes that matter; they get a small share of the time.
        if done or once_s >= enough_s / 8 or machine.now_s() > deadline - budget_s / 2:
            left_s = max(deadline - machine.now_s(), 0)
            seconds = sample(product, machine, left_s if done and machine.is_cuda else left_s / 3)
            roof = roof_of(2.0 * size**3, seconds, product.method)
            best = roof if best is None or roof.per_s > best.per_s else best
        if best is not None and (done or machine.now_s() > deadline):
            return best
        size *= 2


def measurable_dtypes(device: torch.device) -> list[str]:
    """The dtypes whose matrix products this device has; those it emulates are measured all the same, and tell."""
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


def square_size(roof: Roof) -> int:
    """The side of the squares that a roof of `measure_gemm` was reached with."""
    return int(roof.method.split("x")[0])


def square_product(device: torch.device, dtype: str, size: int) -> SquareProduct:
    """A product of two random squares in this dtype. Raises what torch raises where the device has none."""
    method = f"{size}x{size}x{size}"
    if dtype == TFLOAT32:
        full = square_product(device, "float32", size)
        return SquareProduct(lambda: _with_tf32(full), method)
    if dtype == _FLOAT8:
        return _float8_product(device, size, method)
    if dtype == "int8":
        a = torch.randint(-127, 127, (size, size), device=device, dtype=torch.int8)
        b = torch.randint(-127, 127, (size, size), device=device, dtype=torch.int8).t()
        return SquareProduct(lambda: torch._int_mm(a, b), method)
    kind = getattr(torch, dtype)
    x = torch.randn(size, size, device=device, dtype=kind)
    weight = torch.randn(size, size, device=device, dtype=kind)
    return SquareProduct(lambda: F.linear(x, weight), method)


def _float8_product(device: torch.device, size: int, method: str) -> SquareProduct:
    """A product as torchao's linears run it: a scale a row on both sides, accumulated fast, given in bfloat16.

    torchao 0.18: Float8DynamicActivationFloat8WeightConfig sets `use_fast_accum`, and
    `addmm_float8_unwrapped_inference` (float8/inference.py) calls this very product. Where the package mslk is
    installed, torchao runs mslk's kernel instead. Where scales by rows fail, both sides have one scale: torch 2.10 on
    sm_120 gives CUBLAS_STATUS_NOT_SUPPORTED by rows, and multiplies by tensors (pytorch/pytorch#192707).
    """
    left = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    right = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()

    def scaled(rows: int, columns: int) -> Callable[[], object]:
        of_left, of_right = torch.ones(rows, 1, device=device), torch.ones(1, columns, device=device)
        return lambda: torch._scaled_mm(
            left, right, scale_a=of_left, scale_b=of_right, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    by_rows = scaled(size, size)
    try:
        by_rows()
    except RuntimeError:
        return SquareProduct(scaled(1, 1), f"{method}, one scale a tensor: scales by rows failed")
    return SquareProduct(by_rows, method)


def _with_tf32(call: Callable[[], object]) -> object:
    """Run one product in TensorFloat-32; the setting is put back, since the model keeps its own."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return call()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
