"""Memory of a device and of this process: total, available, peak."""

from __future__ import annotations

import contextlib
import functools
import math
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
    """The files with a cgroup's memory limit and use, and the name of its cached pages in memory.stat."""

    controller: str
    """In /proc/self/cgroup, and the folder of the hierarchy; empty in version 2, which has one for all."""
    limit: str
    used: str
    inactive: str


_CGROUPS = (
    _CgroupFiles("", "memory.max", "memory.current", "inactive_file"),
    _CgroupFiles("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Versions 2 (kernel.org, admin-guide/cgroup-v2) and 1 (cgroup-v1/memory)."""
_OWN_SEGMENT, _SEGMENT_UNIT, _UNSPLIT = 10 << 20, 2 << 20, 1 << 20
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): writing 5 resets the peak resident set size


def available_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on `device`, within a container's limit (cgroup) on a CPU."""
    if device.type == "cuda":
        import torch

        free, _total = torch.cuda.mem_get_info(device)
        return int(free) + unused_bytes(device)
    import psutil

    free_bytes = [int(psutil.virtual_memory().available)]
    for folder, files in _cgroups(CGROUP_FOLDER, OWN_CGROUPS):
        if (limit := _number(folder / files.limit)) is not None:
            free_bytes.append(limit - (_number(folder / files.used) or 0))
            with contextlib.suppress(OSError, KeyError, ValueError):  # the kernel reclaims inactive pages of files
                lines = (folder / "memory.stat").read_text().splitlines()
                free_bytes[-1] += int(dict(line.split() for line in lines)[files.inactive])
    return min(free_bytes)


def total_bytes(device: torch.device) -> int:
    """Return the total memory of `device` in bytes; on a CPU the container's (cgroup) limit counts."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    import psutil

    limits = (_number(folder / files.limit) for folder, files in _cgroups(CGROUP_FOLDER, OWN_CGROUPS))
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def page_faults() -> int:
    """Return the number of pages that this process touched for the first time: malloc returns large freed buffers."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def unused_bytes(device: torch.device) -> int:
    """Return torch's unused bytes for a CUDA device's default stream; 0 for an allocator without a snapshot."""
    in_default_pool = _segments(device, (0, 0))
    unused = (each["total_size"] - each["allocated_size"] for each in in_default_pool if each["stream"] == 0)
    return int(sum(unused))


def pool_bytes(device: torch.device, pool_id: tuple[int, int]) -> int:
    """Return the bytes that torch's allocator holds for a private pool, used or not; 0 without a snapshot."""
    return sum(int(segment["total_size"]) for segment in _segments(device, pool_id))


def _segments(device: torch.device, pool_id: tuple[int, int]) -> list[dict[str, Any]]:
    """The segments of a pool of torch's allocator (torch/csrc/cuda/Module.cpp, `segmentInfoToDict`)."""
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
    """The folders and files of this process's cgroups (cgroups(7)) and of their ancestors, whose limits hold as well.

    A container's root is its own. They are looked for once, since `why` reads the free memory within calls.
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


def _number(file: Path) -> int | None:
    """The number in a file of a cgroup; None if the file is missing or says "max" (no limit)."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of the distinct storages of `tensors`, or of those that they wrap; on meta, of elements."""
    sizes: dict[object, int] = {}
    for tensor in tensors:
        for inner in inner_tensors(tensor):
            if inner.device.type == "meta":
                sizes[id(inner)] = inner.numel() * inner.element_size()
            else:
                storage = inner.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def block_bytes(nbytes: int) -> int:
    """Return the bytes that torch counts as allocated for a large tensor in a new segment of CUDA memory.

    A segment of 10 MiB or more has a multiple of 2 MiB, and a rest of up to 1 MiB stays with the tensor
    (c10/cuda/CUDACachingAllocator.cpp, `get_allocation_size` and `should_split`).
    """
    segment_bytes = math.ceil(nbytes / _SEGMENT_UNIT) * _SEGMENT_UNIT
    return segment_bytes if nbytes >= _OWN_SEGMENT and segment_bytes - nbytes <= _UNSPLIT else nbytes


def inner_tensors(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors that contain a tensor's data: itself, those that a subclass wraps, or none for None."""
    if tensor is None:
        return []
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]
