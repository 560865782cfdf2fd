"""Bandwidth from the host's memory, the disk or another GPU to a device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from profiler import effort
from profiler.device.machine import Machine
from profiler.facts.roofs import PINNED, Roof
from profiler.roofs.sampler import attempt, random_bytes, roof_of, sample

_LINK_BYTES = 256 << 20


def measure_links(
    names: Sequence[str], machine: Machine, budget_s: float | None = None
) -> tuple[dict[str, Roof], dict[str, str]]:
    """Measure the bytes/s at which weights reach the device from the `host`, the `disk` or another GPU (`cuda:N`).

    `budget_s` is for each link, by default that of a roof. Returns the links by name, and the reason for each link that
    could not be measured. For a GPU's `host` link it also measures pinned memory, which accelerate's hooks do not use.
    Raises DeviceError.
    """
    budget_s = effort.STANDARD.roof_s if budget_s is None else budget_s
    links: dict[str, Roof] = {}
    missing: dict[str, str] = {}
    for name in (*names, *((PINNED,) if "host" in names and machine.is_cuda else ())):
        with attempt(f"the link from {name}", machine, missing):
            links[name] = _LINKS.get(name, partial(_direct_link, name))(machine, budget_s)
    return links, missing


def _host_link(machine: Machine, budget_s: float) -> Roof:
    """Bytes/s from the host's ordinary memory to the device, copied as accelerate fetches offloaded weights.

    accelerate 1.15: `AlignDevicesHook.pre_forward` -> `set_module_tensor_to_device` -> `value.to(device)`, where
    `value` was never pinned. The driver copies it through its own buffer while the host waits.
    """
    source = random_bytes(_LINK_BYTES, torch.device("cpu"))
    seconds = sample(lambda: source.to(machine.device, copy=True), machine, budget_s)
    return roof_of(_LINK_BYTES, seconds, "256 MiB, pageable host memory to device")


def _direct_link(name: str, machine: Machine, budget_s: float) -> Roof:
    """Bytes/s from the host's pinned memory, which the GPU reads directly, or another GPU's (NVLink or PCIe)."""
    is_pinned = name == PINNED
    source = random_bytes(_LINK_BYTES, torch.device("cpu" if is_pinned else name))
    source = source.pin_memory() if is_pinned else source
    target = torch.empty_like(source, device=machine.device)
    seconds = sample(lambda: target.copy_(source, non_blocking=True), machine, budget_s)
    ends = "pinned host memory to device" if is_pinned else f"{name} to {machine.device}"
    return roof_of(_LINK_BYTES, seconds, f"256 MiB, {ends}")


def _disk_link(machine: Machine, budget_s: float) -> Roof:
    with disk_fetch(_LINK_BYTES, machine) as fetch:
        seconds = sample(fetch, machine, budget_s)
    return roof_of(_LINK_BYTES, seconds, "256 MiB file, not in the page cache, mapped and copied")


@contextmanager
def disk_fetch(nbytes: int, machine: Machine) -> Iterator[Callable[[], torch.Tensor]]:
    """Yield a function that reads a file of `nbytes` random bytes to the device.

    It copies a memory map, as accelerate reads offloaded weights. The file leaves the page cache before each read: the
    weights of a model that does not fit in memory are not cached either.
    """
    with tempfile.TemporaryFile(prefix="roofscope-link-") as file:
        np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8).tofile(file)
        file.flush()
        os.fsync(file.fileno())

        def read() -> torch.Tensor:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return torch.tensor(np.memmap(file, dtype=np.uint8, mode="r")).to(machine.device)

        yield read


_LINKS = {"host": _host_link, "disk": _disk_link}
