"""The links to a device: from the host's memory, the disk, another card."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from profiler.machine.machine import Machine
from profiler.roofs.sampling import STAGE_BUDGET_S, roof_of, sample
from profiler.roofs.values import Roof


def measure_links(names: Sequence[str], machine: Machine, budget_s: float = STAGE_BUDGET_S) -> dict[str, Roof]:
    """Bytes/s from the `host`'s memory, the `disk` or another card (`cuda:N`) to the device."""
    return {name: _LINKS.get(name, partial(_peer_link, name))(machine, budget_s) for name in names}


def _host_link(machine: Machine, budget_s: float) -> Roof:
    """Bytes a second from the host's pinned memory to the device."""
    nbytes = 256 << 20
    source = torch.rand(nbytes // 4, pin_memory=machine.is_cuda)
    target = torch.empty(nbytes // 4, device=machine.device)
    seconds = sample(lambda: target.copy_(source, non_blocking=True), machine, budget_s)
    return roof_of(nbytes, seconds, "256 MiB, pinned host memory to device")


def _peer_link(peer: str, machine: Machine, budget_s: float) -> Roof:
    """Bytes a second from another card (NVLink or PCIe)."""
    nbytes = 256 << 20
    source = torch.rand(nbytes // 4, device=peer)
    target = torch.empty(nbytes // 4, device=machine.device)
    seconds = sample(lambda: target.copy_(source, non_blocking=True), machine, budget_s)
    return roof_of(nbytes, seconds, f"256 MiB, {peer} to {machine.device}")


def _disk_link(machine: Machine, budget_s: float) -> Roof:
    """Bytes a second from a file to the device, the way accelerate reads offloaded weights: a copy of a memory map.

    The file leaves the page cache before each read where the system allows it: a model that does not fit in memory
    finds its weights gone from there as well.
    """
    nbytes = 256 << 20
    with tempfile.TemporaryFile(prefix="roofscope-link-") as file:
        np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8).tofile(file)
        file.flush()
        os.fsync(file.fileno())

        def read() -> torch.Tensor:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return torch.tensor(np.memmap(file, dtype=np.uint8, mode="r")).to(machine.device)

        seconds = sample(read, machine, budget_s)
    return roof_of(nbytes, seconds, "256 MiB file, not in the page cache, mapped and copied")


_LINKS = {"host": _host_link, "disk": _disk_link}
