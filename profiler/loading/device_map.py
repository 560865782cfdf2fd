"""Device maps: place the parts of a model over GPU, host memory and disk if they do not fit on one device."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler.data.free_memory import room_bytes
from profiler.device.memory import available_bytes, storage_bytes
from profiler.errors import ModelError
from profiler.quant.registry import Quant, library_of


@dataclass(frozen=True)
class DeviceMap:
    """accelerate's placement of a model over devices, the host's memory and the disk."""

    device_map: dict[str, str]
    """Module name -> `cuda:N`, `cpu` or `disk`."""
    folder: tempfile.TemporaryDirectory[str] | None
    """Contains the weights on disk; None if there are none."""

    def device_of(self, module_name: str) -> torch.device | None:
        """Return the device of this module's own tensors, or None for the disk."""
        parts = module_name.split(".")
        for end in range(len(parts), -1, -1):
            location = self.device_map.get(".".join(parts[:end]))
            if location is not None:
                return None if location == "disk" else torch.device(location)
        return torch.device("cpu")


OtherBytesOf = Callable[[nn.Module], int]
"""Returns the bytes that a step of a model on meta needs besides its weights."""


def plan_device_map(
    module: nn.Module, device: torch.device, quant: Quant = "none", other_bytes_of: OtherBytesOf = lambda _: 0
) -> DeviceMap | None:
    """Return accelerate's automatic placement of `module` (on meta), or None if it fits on `device`.

    It fits with the other bytes that a step needs. A CUDA device spills to host memory and then to disk, a CPU to
    disk. Raises ModelError if the disk is too small, or for quantised weights there, which are not supported.
    """
    weight_bytes = planned_weight_bytes(module)
    for_weights_bytes = max(0, room_here_bytes(device) - other_bytes_of(module))
    if weight_bytes <= for_weights_bytes:
        return None
    from accelerate import infer_auto_device_map

    budget: dict[Any, Any] = {"cpu": for_weights_bytes}
    if device.type == "cuda":
        # Without other GPUs of the host: accelerate would run the parts that it places there on that GPU. Its own
        # `get_max_memory` opens a context on each, and has no "cpu" where the GPU shares the host's memory.
        budget = {device.index: for_weights_bytes, "cpu": available_bytes(torch.device("cpu"))}
    no_split = list(getattr(module, "_no_split_modules", None) or [])
    inferred: dict[str, Any] = infer_auto_device_map(module, budget, no_split)
    device_map = {name: f"cuda:{where}" if isinstance(where, int) else where for name, where in inferred.items()}
    if "disk" not in device_map.values():
        return DeviceMap(device_map, None)
    folder = tempfile.TemporaryDirectory(prefix="roofscope-offload-", ignore_cleanup_errors=True)
    disk_bytes = shutil.disk_usage(folder.name).free
    if quant != "none" or weight_bytes > disk_bytes + for_weights_bytes:
        folder.cleanup()
        reason = (
            f"the disk has {disk_bytes / 1e9:.1f} GB free"
            if quant == "none"
            else "bitsandbytes weights cannot be offloaded to disk"
        )
        raise ModelError(
            f"the weights need {weight_bytes / 1e9:.1f} GB, but {for_weights_bytes / 1e9:.1f} GB are free in"
            f" memory, and {reason}; use a 16-bit --dtype, --quant nf4, or a smaller model."
        )
    return DeviceMap(device_map, folder)


def room_here_bytes(device: torch.device) -> int:
    """Return the bytes that a model, its KV cache and its workspace may take now on `device` (`data.free_memory`)."""
    return room_bytes(device.type, available_bytes(device))


def planned_weight_bytes(module: nn.Module) -> int:
    """Return the bytes that a model on meta will take once it is loaded. Tied weights count once."""
    sizes: dict[int, int] = {}
    for owner in module.modules():
        for param in owner.parameters(recurse=False):
            library = library_of(param)
            sizes[id(param)] = library.stored(owner).weight_bytes if library else storage_bytes([param])
        sizes[id(owner)] = storage_bytes(owner.buffers(recurse=False))  # GPTQ and AWQ keep their integers in them
    return sum(sizes.values())


def dispatch(module: nn.Module, placement: DeviceMap, device: torch.device, index: dict[str, Any]) -> None:
    """Make accelerate fetch offloaded weights whenever their layer runs; `index` has the tensors in the folder."""
    from accelerate import dispatch_model
    from accelerate.utils import save_offload_index

    folder = placement.folder.name if placement.folder else None
    if folder is not None:
        save_offload_index(index, folder)
    # accelerate compares the main device with the string "cpu" to decide what counts as offloaded.
    dispatch_model(module, dict(placement.device_map), main_device=str(device), offload_dir=folder, force_hooks=True)


def offloaded_bytes(module: nn.Module, placement: DeviceMap | None) -> dict[str, int]:
    """Return the bytes of weights that are fetched in every step and else on meta, by location: `host` or `disk`."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    for name, owner in module.named_modules():
        for param in owner.parameters(recurse=False):
            if placement is None or param.device.type != "meta" or id(param) in seen:
                continue
            seen.add(id(param))
            location = "disk" if placement.device_of(name) is None else "host"
            sizes[location] = sizes.get(location, 0) + param.numel() * param.element_size()
    return sizes
