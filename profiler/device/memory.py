"""Memory of a device and of this process: total, available, peak."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


CGROUP_FOLDER = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _CgroupFiles:
    """Where a container's memory is told of, and how its cached pages are named."""

    limit: str
    used: str
    stat: str
    inactive: str


_CGROUPS = (
    _CgroupFiles("memory.max", "memory.current", "memory.stat", "inactive_file"),
    _CgroupFiles(
        "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"
    ),
)
"""Versions 2 (kernel.org, admin-guide/cgroup-v2) and 1 (cgroup-v1/memory)."""
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): writing 5 resets the peak resident set size


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`; on a CPU the container's (cgroup) limit counts.

    On CUDA this counts what the driver calls free and the unused blocks that torch's allocator gives to the next tensor
    of the default stream. Unused blocks of live graphs' private pools and of other streams are not available.
    """
    if device.type == "cuda":
        import torch

        free, _total = torch.cuda.mem_get_info(device)
        return int(free) + unused_bytes(device)
    import psutil

    return min(int(psutil.virtual_memory().available), _cgroup_available_bytes())


def total_bytes(device: torch.device) -> int:
    """Bytes of memory that `device` has in all; on a CPU the container's (cgroup) limit counts."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    import psutil

    limits = [int(psutil.virtual_memory().total), *_cgroup_limits()]
    return min(limits)


def trim_heap() -> None:
    """Give what malloc keeps of freed memory back to the system (malloc_trim(3)); C libraries but glibc have no such
    call, and keep it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak(device: torch.device) -> None:
    """Start a new peak measurement for `peak_bytes`; does nothing where the system cannot."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes in use since `reset_peak`: the allocator's on CUDA, this process's resident set on a CPU.

    None where the system does not say.
    """
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def page_faults() -> int:
    """Pages that this process has touched for the first time since it began; 0 where the system does not count them.

    malloc gives large buffers back to the system when they are freed (glibc's mallopt(3): M_TRIM_THRESHOLD,
    M_MMAP_THRESHOLD), so that a process that frees and takes them again and again pays for fresh pages each time.
    """
    try:
        import resource
    except ImportError:  # not a Unix
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def allocated_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that live tensors of this process hold; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    import torch

    return int(torch.cuda.memory_allocated(device))


_DEFAULT_POOL = (0, 0)
_DEFAULT_STREAM = 0


def unused_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator holds unused for the default stream of a CUDA device, outside private pools.

    The keys are those of `torch.cuda.memory_snapshot` (torch/csrc/cuda/Module.cpp, `segmentInfoToDict`).
    """
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        int(segment["total_size"]) - int(segment["allocated_size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index
        and tuple(segment["segment_pool_id"]) == _DEFAULT_POOL
        and segment["stream"] == _DEFAULT_STREAM
    )


def _cached_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator holds of a CUDA device without a live tensor in them."""
    import torch

    return int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def used_bytes(device: torch.device) -> int | None:
    """Bytes of a CUDA device in use by everyone on it; None on a CPU, where the process's own peak says more."""
    if device.type != "cuda":
        return None
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return int(total - free) - _cached_bytes(device)


def _cgroup_limits() -> list[int]:
    return [limit for files in _CGROUPS if (limit := _number(files.limit)) is not None]


def _cgroup_available_bytes() -> int:
    """What the container's limits leave; pages that only cache files are given back where they are needed."""
    free = [
        limit - (_number(files.used) or 0) + _reclaimable_bytes(files)
        for files in _CGROUPS
        if (limit := _number(files.limit)) is not None
    ]
    return min(free, default=1 << 62)


def _reclaimable_bytes(files: _CgroupFiles) -> int:
    """Cached pages that nobody has used lately: what the kubelet, too, takes off the memory in use."""
    try:
        told = dict(line.split() for line in (CGROUP_FOLDER / files.stat).read_text().splitlines())
        return int(told[files.inactive])
    except (OSError, KeyError, ValueError):
        return 0


def _number(name: str) -> int | None:
    """What a file of the container's says; None where there is none, or no limit ("max")."""
    try:
        return int((CGROUP_FOLDER / name).read_text())
    except (OSError, ValueError):
        return None


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Sum of the distinct storages behind `tensors` (the whole storage, as allocated); on meta, of their elements.

    A tensor subclass that holds other tensors (torchao's packed weights) is taken apart.
    """
    sizes: dict[object, int] = {}
    for tensor in tensors:
        for inner in inner_tensors(tensor):
            if inner.device.type == "meta":
                sizes[id(inner)] = inner.numel() * inner.element_size()
            else:
                storage = inner.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def inner_tensors(tensor: Any) -> list[torch.Tensor]:
    """The tensors that hold a tensor's data: itself, or those within a subclass that packs several; none for None."""
    if tensor is None:
        return []
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]


NO_FALLBACK = "set 'CUDA - Sysmem Fallback Policy' to 'Prefer No Sysmem Fallback' in Windows' NVIDIA Control Panel"
"""NVIDIA's own words for it: nvidia.custhelp.com, answer 5490."""
MAY_SPILL = "allocations beyond the card's memory may spill to system memory without an error, and steps get slow"
"""Under WSL, whatever that setting says (github.com/microsoft/WSL, issue 11050)."""
