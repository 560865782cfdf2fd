"""Memory of a device and of this process: total, available, peak."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


CGROUP_FOLDER = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class _CgroupFiles:
    """The files with a cgroup's memory limit and use, and the name of its cached pages in `stat`."""

    controller: str
    """In /proc/self/cgroup, and the folder of the hierarchy; empty in version 2, which has one for all."""
    limit: str
    used: str
    stat: str
    inactive: str


_CGROUPS = (
    _CgroupFiles("", "memory.max", "memory.current", "memory.stat", "inactive_file"),
    _CgroupFiles("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"),
)
"""Versions 2 (kernel.org, admin-guide/cgroup-v2) and 1 (cgroup-v1/memory)."""
_STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): writing 5 resets the peak resident set size


def available_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on `device`; on a CPU the container's (cgroup) limit counts.

    On CUDA this is the driver's free memory, plus the unused blocks that torch's allocator gives to the next tensor of
    the default stream. Unused blocks of live graphs' private pools and of other streams are not available.
    """
    if device.type == "cuda":
        import torch

        free, _total = torch.cuda.mem_get_info(device)
        return int(free) + unused_bytes(device)
    import psutil

    room = [int(psutil.virtual_memory().available)]
    for folder, files in _cgroups(CGROUP_FOLDER, OWN_CGROUPS):
        if (limit := _number(folder / files.limit)) is not None:
            room.append(limit - (_number(folder / files.used) or 0) + _reclaimable_bytes(folder, files))
    return min(room)


def total_bytes(device: torch.device) -> int:
    """Return the total memory of `device` in bytes; on a CPU the container's (cgroup) limit counts."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    import psutil

    limits = [
        limit
        for folder, files in _cgroups(CGROUP_FOLDER, OWN_CGROUPS)
        if (limit := _number(folder / files.limit)) is not None
    ]
    return min([int(psutil.virtual_memory().total), *limits])


def trim_heap() -> None:
    """Return freed memory from malloc to the system (malloc_trim(3)). Only glibc has this call; others keep it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_resident_bytes() -> int | None:
    """Return the peak of this process's resident set, in bytes; None where the system does not report it."""
    lines = _STATUS.read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def page_faults() -> int:
    """Return the number of pages that this process touched for the first time.

    malloc returns large buffers to the system when they are freed (glibc's mallopt(3): M_TRIM_THRESHOLD,
    M_MMAP_THRESHOLD). A process that repeatedly frees and allocates them pays for fresh pages each time.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


_DEFAULT_POOL = (0, 0)
_DEFAULT_STREAM = 0


def unused_bytes(device: torch.device) -> int:
    """Return the unused bytes in torch's allocator for a CUDA device's default stream, outside private pools.

    It is 0 for CUDA's own allocator (`PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync`), which has no snapshot.
    """
    return sum(
        int(segment["total_size"]) - int(segment["allocated_size"])
        for segment in _segments(device, _DEFAULT_POOL)
        if segment["stream"] == _DEFAULT_STREAM
    )


def pool_bytes(device: torch.device, pool_id: tuple[int, int]) -> int:
    """Return the bytes of a CUDA device that torch's allocator holds for one private pool, used or not.

    It is 0 for CUDA's own allocator, which has neither a snapshot nor pools.
    """
    return sum(int(segment["total_size"]) for segment in _segments(device, pool_id))


def _segments(device: torch.device, pool_id: tuple[int, int]) -> list[dict[str, Any]]:
    """The segments of a pool of torch's allocator on a CUDA device.

    The keys are those of `torch.cuda.memory_snapshot` (torch/csrc/cuda/Module.cpp, `segmentInfoToDict`).
    """
    import torch

    if torch.cuda.get_allocator_backend() != "native":
        return []
    index = torch.cuda.current_device() if device.index is None else device.index
    return [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) == pool_id
    ]


@functools.cache
def _cgroups(root: Path, own_file: Path) -> tuple[tuple[Path, _CgroupFiles], ...]:
    """The folders of this process's cgroups and of their ancestors, whose limits hold as well, and their files.

    The paths are those of cgroups(7), "/proc/[pid]/cgroup". In a container they may be missing: its root is its own.
    They are looked for once, since `why` looks at the free memory within the calls of a script.
    """
    found = []
    own: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in own_file.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own |= dict.fromkeys(controllers.split(","), path.strip("/"))
    for files in _CGROUPS:
        group = PurePosixPath(own.get(files.controller, ""))
        folders = (root / files.controller / each for each in (group, *group.parents))
        found += [(folder, files) for folder in folders if (folder / files.limit).exists()]
    return tuple(found)


def _reclaimable_bytes(folder: Path, files: _CgroupFiles) -> int:
    """Bytes of inactive file-cache pages, which the kernel reclaims when needed; the kubelet subtracts them, too."""
    try:
        counts = dict(line.split() for line in (folder / files.stat).read_text().splitlines())
        return int(counts[files.inactive])
    except (OSError, KeyError, ValueError):
        return 0


def _number(file: Path) -> int | None:
    """The number in a file of a cgroup; None if the file is missing or says "max" (no limit)."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of the distinct storages of `tensors`, as allocated; on meta, the bytes of their elements.

    Tensor subclasses that wrap other tensors (torchao's packed weights) count by those.
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
    """Return the tensors that contain a tensor's data: itself, those that a subclass wraps, or none for None."""
    if tensor is None:
        return []
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]
