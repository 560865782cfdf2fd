"""Kinds of faults: the errors that each API can really raise, and the false answers that it can give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pynvml
import torch

_PAUSE_S = 5.0
"""Pause of a virtual machine that moves to another host during a run."""
_ILLEGAL_ADDRESS, _INVALID_VALUE, _NOT_READY = 700, 1, 600
"""Values of cudaError_t (CUDA Runtime API)."""


@dataclass(frozen=True)
class Kind:
    """A way to fail: an exception or a false answer."""

    raised: Callable[[], BaseException] | None = None
    lie: Callable[[Any], Any] | None = None
    """Returns a false answer for the true one."""
    sticky: bool = False
    """Whether every later call to the device gives the same error, as with a broken CUDA context."""
    slow: float = 1.0
    """The factor by which the call takes longer."""
    spreads: bool = False
    """Whether every later call of the API also fails, at any site."""


def _cuda(text: str, code: int) -> Callable[[], BaseException]:
    """Return the exception that torch raises for a CUDA error since 2.8 (c10/cuda/CUDAException.cpp)."""

    def made() -> BaseException:
        error = torch.AcceleratorError(f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported.")
        error.error_code = code  # type: ignore[attr-defined]
        return error

    return made


def _raises(kind: type[BaseException], *arguments: object, **more: bool) -> Kind:
    return Kind(lambda: kind(*arguments), **more)


KINDS: dict[str, Kind] = {
    "sticky": Kind(_cuda("an illegal memory access was encountered", _ILLEGAL_ADDRESS), sticky=True),
    "passing": Kind(_cuda("invalid argument", _INVALID_VALUE)),
    "not-ready": Kind(_cuda("device not ready", _NOT_READY)),
    "runtime": _raises(RuntimeError, "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"),
    "no-kernel": _raises(RuntimeError, "No available kernel. Aborting execution."),
    "not-set-up": _raises(RuntimeError, "CUDA unknown error - this may be due to an incorrectly set up environment"),
    "cupti": _raises(RuntimeError, "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"),
    "inductor": _raises(RuntimeError, "Cannot find a working triton installation."),
    "assertion": _raises(AssertionError, "int4 needs a group size that divides the inputs"),
    "oom": _raises(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20.00 MiB."),
    "unimplemented": _raises(NotImplementedError, "Could not run the operator with arguments from the 'CUDA' backend"),
    "nvml-lost": _raises(pynvml.NVMLError_GpuIsLost),
    "nvml-unsupported": _raises(pynvml.NVMLError_NotSupported),
    "nvml-library": _raises(pynvml.NVMLError_LibraryNotFound),
    "zero": Kind(lie=lambda _: 0.0),
    "negative": Kind(lie=lambda value: -abs(value) or -1.0),
    "nan": Kind(lie=lambda _: math.nan),
    "later": Kind(lie=lambda value: value + _PAUSE_S, spreads=True),
    "tenfold": Kind(lie=lambda value: 10 * value),
    "halved": Kind(lie=lambda value: value // 2),
    "none-free": Kind(lie=lambda value: (0, value[1])),
    "twice-free": Kind(lie=lambda value: (2 * value[0], value[1])),
    "slow": Kind(slow=10.0),
}

_NVML = ("nvml-lost", "nvml-unsupported")
_CALL = ("passing", "sticky")


def _alike(names: str, *kinds: str) -> dict[str, tuple[str, ...]]:
    """Return functions of torch.cuda that fail in the same ways."""
    return {f"torch.cuda.{name}": kinds for name in names.split()}


PLAUSIBLE: Mapping[str, tuple[str, ...]] = {
    "kernel": ("sticky", "passing", "slow"),
    "allocate": ("oom",),
    **_alike("synchronize", *_CALL, "slow"),
    **_alike("Event Stream CUDAGraph CUDAGraph.capture_begin stream set_stream current_stream", "passing"),
    **_alike("nvtx.range_push nvtx.range_pop", "passing"),
    **_alike("Event.record Event.synchronize graph.__enter__ empty_cache", *_CALL),
    **_alike("Event.elapsed_time", "not-ready", "zero", "negative", "nan", "tenfold"),
    **_alike("CUDAGraph.replay", *_CALL, "oom", "slow"),
    **_alike("CUDAGraph.capture_end", "passing", "oom"),
    **_alike("set_device", "passing", "not-set-up"),
    **_alike("current_device get_device_properties get_device_capability get_device_name", "not-set-up"),
    **_alike("is_bf16_supported reset_peak_memory_stats", "not-set-up"),
    **_alike("mem_get_info", *_CALL, "none-free", "twice-free"),
    "torch.nn.functional.scaled_dot_product_attention": ("no-kernel", "unimplemented", "oom"),
    "torch._fused_sdp_choice": ("unimplemented", "no-kernel"),
    **dict.fromkeys(("torch._scaled_mm", "torch._int_mm", "torch._grouped_mm"), ("unimplemented", "runtime")),
    "torch.compile": ("inductor",),
    "torch.profiler.profile": ("cupti",),
    "pynvml.nvmlInit": ("nvml-library",),
    "pynvml.nvmlDeviceGetClockInfo": (*_NVML, "halved"),
    "pynvml": _NVML,
    "bitsandbytes": ("runtime", "unimplemented"),
    "torchao": ("assertion", "unimplemented"),
    "time.perf_counter": ("later",),
}
"""Kinds by an API's name, or by the part before its last or first dot. Other APIs are recorded but never fail.

The allocator's statistics are not listed. They call no driver, and are empty before CUDA is set up
(torch/cuda/memory.py, `memory_stats_as_nested_dict`).
"""


def plausible(api: str) -> tuple[str, ...]:
    for name in (api, api.rpartition(".")[0], api.split(".")[0]):
        if name in PLAUSIBLE:
            return PLAUSIBLE[name]
    return ()


_ONCE = frozenset({"torch.cuda.Event", "torch.cuda.current_stream"})
"""APIs that call no driver: they fail rarely, and one failure per call site is enough."""


def modes(api: str, kind: str) -> tuple[str, ...]:
    if KINDS[kind].spreads:
        return ("on",)
    return ("once",) if KINDS[kind].sticky or api in _ONCE else ("once", "on")


NEEDS_DEVICE = frozenset(
    {
        "kernel", "torch.cuda.synchronize", "torch.cuda.Event", "torch.cuda.Event.record",
        "torch.cuda.Event.elapsed_time", "torch.cuda.Event.synchronize", "torch.cuda.Stream",
        "torch.cuda.CUDAGraph.replay", "torch.cuda.CUDAGraph.capture_end", "torch.cuda.graph.__enter__",
        "torch.cuda.mem_get_info", "torch.cuda.empty_cache",
    }
)  # fmt: skip
"""APIs that return the error of a broken context."""
