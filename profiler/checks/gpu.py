"""Checks of a GPU: matrix products, captures and memory. Each runs once and leaves no state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler.checks.installation import CheckResult
from profiler.device.device import compute_capability, under_wsl
from profiler.device.memory import MAY_SPILL, NO_FALLBACK
from profiler.errors import RequestError, first_line
from profiler.units import several

if TYPE_CHECKING:
    import torch

    from profiler.device.machine import Machine

_SIDE = 64
"""Rows and columns of the operands: `torch._int_mm` needs over 16 rows, and `torch._scaled_mm` multiples of 16."""
_EXCESS_BYTES = 1 << 30
_BLOCK_BYTES = 64 << 20
"""torch's allocator makes a separate segment for a block of 10 MiB or more (CUDACachingAllocator.h, kMinLargeAlloc)."""


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
    import torch

    left = _first_column(device, torch.float32).to(torch.float8_e4m3fn)
    right = torch.ones(_SIDE, _SIDE, device=device).to(torch.float8_e4m3fn).t()
    rows, columns = ((_SIDE, 1), (1, _SIDE)) if by_row else ((), ())
    scale_a, scale_b = torch.ones(rows, device=device), torch.ones(columns, device=device)
    # torchao's fp8 linears and the roof of fp8 (profiler/roofs/gemm.py) make the same call.
    return lambda: torch._scaled_mm(
        left, right, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


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


def product(machine: Machine, kind: OptionalProduct) -> CheckResult:
    """Check that a matrix product runs on this GPU, gives the right values, and does not block the host."""
    try:
        call = kind.made(machine.device)
        wrong = bool((call() != 1).any())
    except Exception as error:
        if compute_capability(machine.device) < kind.capability:
            return CheckResult(kind.name, None, kind.older)
        return CheckResult(kind.name, False, f"{first_line(error)}; {kind.fails}")
    if wrong:
        return CheckResult(kind.name, False, f"gives wrong values: {kind.fails}")
    if machine.waits(call):  # without a kernel for the GPU, `_grouped_mm` reads the groups' ends (GroupedMMUtils.h)
        return CheckResult(kind.name, True, "works, but waits for the GPU in every call: no --engine graph", slow=True)
    return CheckResult(kind.name, True, kind.works)


def out_of_memory(machine: Machine) -> CheckResult:
    """Check that an allocation beyond the GPU's memory fails; a run and `batch-test` find the end of memory by that.

    Not tried if another process uses the GPU, and never under WSL, where it can crash Windows
    (github.com/microsoft/WSL, issue 40732).
    """
    import torch

    name = "out of memory"
    if under_wsl():
        return CheckResult(name, False, f"not tried under WSL: {MAY_SPILL}; {NO_FALLBACK}")
    if getattr(torch.cuda.get_device_properties(machine.device), "is_integrated", False):
        return CheckResult(name, None, "not tried: this GPU shares the host's memory")
    processes = machine.source.read().other_processes
    if processes is None:
        return CheckResult(name, None, "not tried: NVML does not say which processes use this GPU")
    if processes:
        return CheckResult(
            name, None, f"not tried: {several(processes, 'other process uses', 'other processes use')} this GPU"
        )
    machine.release()
    try:
        torch.empty(machine.available_bytes() + _EXCESS_BYTES, dtype=torch.uint8, device=machine.device)
    except torch.OutOfMemoryError:
        return CheckResult(name, True, "allocations beyond the GPU's memory fail: a run sees the end of memory")
    machine.release()
    return CheckResult(
        name,
        False,
        "allocations beyond the GPU's memory spill to system memory: batch-test cannot see the end of memory;"
        f" {NO_FALLBACK}",
    )


def recovery(machine: Machine) -> CheckResult:
    """Check that torch works after a failed capture, since some captures of a run fail.

    In older versions torch keeps the state of such a capture: its generator up to 2.11 (pytorch#176752), its allocator
    up to 2.12.0 (pytorch#180395).
    """
    import torch

    device, clock = machine.device, machine.clock
    x = torch.ones(1, device=device)

    def add_and_wait() -> None:
        x.add(1)
        clock.synchronize()  # CUDA allows no wait within a capture

    add_and_wait()
    try:
        machine.capture(add_and_wait)
    except RequestError:
        pass
    else:
        return CheckResult("recovery", False, "a capture that waits for the GPU did not fail: captures hold no work")
    faults = []
    if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        faults.append("work goes to another stream: times are wrong")
    try:
        torch.rand(1, device=device)
    except RuntimeError as error:
        faults.append(f"torch draws no random numbers ({first_line(error)}): the run ends early")
    if not _releases_memory(machine):
        faults.append("torch does not give back freed memory: batches run out of memory too early")
    if faults:
        return CheckResult("recovery", False, f"after a failed capture {'; '.join(faults)}; use torch 2.13 or newer")
    return CheckResult("recovery", True, "random numbers, memory and the stream work after a failed capture")


def _releases_memory(machine: Machine) -> bool:
    """Return whether torch returns freed memory to the GPU."""
    import torch

    machine.release()
    block = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device=machine.device)
    before = torch.cuda.memory_reserved(machine.device)
    del block
    machine.release()
    return bool(torch.cuda.memory_reserved(machine.device) < before)
