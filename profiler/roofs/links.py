"""Bandwidth to a device: from the host's memory, the disk, another GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from profiler.device.machine import Machine
from profiler.facts.roofs import PINNED, Roof
from profiler.roofs.sampler import STAGE_BUDGET_S, attempt, random_bytes, roof_of, sample

_LINK_BYTES = 256 << 20


def measure_links(
    names: Sequence[str], machine: Machine, budget_s: float = STAGE_BUDGET_S
) -> tuple[dict[str, Roof], dict[str, str]]:
    """Bytes/s from the `host`'s memory, the `disk` or another card (`cuda:N`) to the device, as weights cross it; and
    the links that could not be measured, each with the reason. Raises DeviceError.

    Next to the host's ordinary memory, which accelerate's hooks copy, stands what pinned memory would reach.
    """
    found: dict[str, Roof] = {}
    missing: dict[str, str] = {}
    for name in (*names, *((PINNED,) if "host" in names and machine.is_cuda else ())):
        with attempt(f"the link from {name}", machine, missing):
            found[name] = _LINKS.get(name, partial(_peer_link, name))(machine, budget_s)
    return found, missing


def _host_link(machine: Machine, budget_s: float) -> Roof:
    """Bytes a second from the host's ordinary memory to the device, the way accelerate fetches offloaded weights.

    accelerate 1.15: `AlignDevicesHook.pre_forward` -> `set_module_tensor_to_device` -> `value.to(device)`, where
    `value` was never pinned: the driver copies it through a buffer of its own while the host waits.
    """
    source = random_bytes(_LINK_BYTES, torch.device("cpu"))
    seconds = sample(lambda: source.to(machine.device, copy=True), machine, budget_s)
    return roof_of(_LINK_BYTES, seconds, "256 MiB, pageable host memory to device")


def _pinned_link(machine: Machine, budget_s: float) -> Roof:
    """Bytes a second from pinned memory of the host to the device, which the card reads by itself."""
    source = random_bytes(_LINK_BYTES, torch.device("cpu")).pin_memory()
    target = torch.empty_like(source, device=machine.device)
    seconds = sample(lambda: target.copy_(source, non_blocking=True), machine, budget_s)
    return roof_of(_LINK_BYTES, seconds, "256 MiB, pinned host memory to device")


def _peer_link(peer: str, machine: Machine, budget_s: float) -> Roof:
    """Bytes a second from another card (NVLink or PCIe)."""
    source = random_bytes(_LINK_BYTES, torch.device(peer))
    target = torch.empty_like(source, device=machine.device)
    seconds = sample(lambda: target.copy_(source, non_blocking=True), machine, budget_s)
    return roof_of(_LINK_BYTES, seconds, f"256 MiB, {peer} to {machine.device}")


def _disk_link(machine: Machine, budget_s: float) -> Roof:
    with disk_fetch(_LINK_BYTES, machine) as fetch:
        seconds = sample(fetch, machine, budget_s)
    return roof_of(_LINK_BYTES, seconds, "256 MiB file, not in the page cache, mapped and copied")


@contextmanager
def disk_fetch(nbytes: int, machine: Machine) -> Iterator[Callable[[], torch.Tensor]]:
    """What reads a file of so many random bytes to the device, the way accelerate reads offloaded weights: a copy of a
    memory map.

    The file leaves the page cache before each read where the system allows it: a model that does not fit in memory
    finds its weights gone from there as well.
    """
    with tempfile.TemporaryFile(prefix="roofscope-link-") as file:
        np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8).tofile(file)
        file.flush()
        os.fsync(file.fileno())

        def read() -> torch.Tensor:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return torch.tensor(np.memmap(file, dtype=np.uint8, mode="r")).to(machine.device)

        yield read


_LINKS = {"host": _host_link, "disk": _disk_link, PINNED: _pinned_link}
