"""The device map: where the parts of a model go when they do not all fit on one device."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from profiler.device.memory import available_bytes, storage_bytes
from profiler.errors import ModelError

# A device that is filled to the last byte cannot run a step; accelerate's own maps keep about as much back.
_FILL_LIMIT = 0.9
_RESERVE_BYTES = 1_500_000_000
"""What a CUDA device keeps free beside the weights: the buffers of the roofs, and a small cell."""


@dataclass(frozen=True)
class DeviceMap:
    """accelerate's placement of a model over devices, the host's memory and the disk."""

    device_map: dict[str, str]
    """Module name -> `cuda:N`, `cpu` or `disk`."""
    folder: tempfile.TemporaryDirectory[str] | None
    """Holds what went to the disk; None when nothing did."""

    def device_of(self, module_name: str) -> torch.device | None:
        """Where this module's own tensors live; None for the disk."""
        parts = module_name.split(".")
        for end in range(len(parts), -1, -1):
            placed = self.device_map.get(".".join(parts[:end]))
            if placed is not None:
                return None if placed == "disk" else torch.device(placed)
        return torch.device("cpu")

    def as_text(self) -> dict[str, str]:
        return {name: str(device) for name, device in self.device_map.items()}


def plan_device_map(module: nn.Module, device: torch.device, *, quantised: bool) -> DeviceMap | None:
    """accelerate's automatic placement when the weights of `module` (on meta) do not fit on `device`, else None.

    A CUDA device spills to the host's memory and then to the disk, a CPU to the disk. Raises ModelError when that does
    not work either: no room on the disk, or weights of bitsandbytes, which cannot live there.
    """
    need = planned_weight_bytes(module)
    room = room_bytes(device)
    if need <= room:
        return None
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_max_memory

    budget: dict[Any, Any] = {"cpu": room}
    if device.type == "cuda":
        # Other cards of the host are left alone: what lies there would be run there.
        budget = {device.index: room, "cpu": get_max_memory()["cpu"]}
    no_split = list(getattr(module, "_no_split_modules", None) or [])
    inferred: dict[str, Any] = infer_auto_device_map(module, budget, no_split)
    device_map = {name: f"cuda:{where}" if isinstance(where, int) else where for name, where in inferred.items()}
    if "disk" not in device_map.values():
        return DeviceMap(device_map, None)
    folder = tempfile.TemporaryDirectory(prefix="roofscope-offload-", ignore_cleanup_errors=True)
    on_disk = shutil.disk_usage(folder.name).free
    if quantised or need > on_disk + room:
        folder.cleanup()
        why = (
            "weights of bitsandbytes cannot be kept on the disk"
            if quantised
            else f"the disk has room for {on_disk / 1e9:.1f} GB"
        )
        raise ModelError(
            f"the weights need {need / 1e9:.1f} GB, but {room / 1e9:.1f} GB of memory is free, and {why};"
            " use a 16-bit --dtype, --quant nf4, or a smaller model."
        )
    return DeviceMap(device_map, folder)


def room_bytes(device: torch.device) -> int:
    """Bytes of `device` that weights may take."""
    free = available_bytes(device)
    most = int(free * _FILL_LIMIT)
    return most if device.type == "cpu" else max(0, min(most, free - _RESERVE_BYTES))


def planned_weight_bytes(module: nn.Module) -> int:
    """Bytes that a model on meta will take once it is loaded, tied weights once."""
    total = 0
    seen: set[int] = set()
    for owner in module.modules():
        for key, param in owner.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            kind = param.__class__.__name__
            size = storage_bytes([param])
            if key == "weight" and kind == "Params4bit":
                # 4 bits a weight and a scale a block of 64: bfloat16 for the fused kernel of a CPU, else float32.
                elements = owner.in_features * owner.out_features
                size = elements // 2 + elements // 64 * (2 if owner.support_avx512bf16_for_cpu else 4)
            elif key == "weight" and kind == "Int8Params":
                size = owner.in_features * owner.out_features
            total += size
        total += storage_bytes(owner.buffers(recurse=False))  # GPTQ and AWQ keep their integers in them
    return total


def dispatch(module: nn.Module, placement: DeviceMap, device: torch.device, index: dict[str, Any]) -> None:
    """Let accelerate fetch what does not live on `device` whenever its layer runs.

    `index` describes the tensors that were already written to the placement's folder (accelerate's own format).
    """
    from accelerate import dispatch_model
    from accelerate.utils import save_offload_index

    folder = placement.folder.name if placement.folder else None
    if folder is not None:
        save_offload_index(index, folder)
    # accelerate compares the main device with the string "cpu" to decide what counts as offloaded.
    dispatch_model(module, dict(placement.device_map), main_device=str(device), offload_dir=folder, force_hooks=True)


def offloaded_bytes(module: nn.Module, placement: DeviceMap | None) -> dict[str, int]:
    """Bytes of weights that cross a link at every step, by where they wait: `host` or `disk`.

    accelerate leaves a parameter that does not live on its device as a meta tensor until its layer runs.
    """
    found: dict[str, int] = {}
    seen: set[int] = set()
    for name, owner in module.named_modules():
        for param in owner.parameters(recurse=False):
            if placement is None or param.device.type != "meta" or id(param) in seen:
                continue
            seen.add(id(param))
            where = "disk" if placement.device_of(name) is None else "host"
            found[where] = found.get(where, 0) + param.numel() * param.element_size()
    return found


def written(tensor: torch.Tensor, name: str, placement: DeviceMap, index: dict[str, Any]) -> None:
    """Write one tensor to the placement's folder and note it in `index`."""
    from accelerate.utils import offload_weight

    assert placement.folder is not None
    offload_weight(tensor, name, placement.folder.name, index)


def read_back(name: str, placement: DeviceMap, index: dict[str, Any]) -> torch.Tensor:
    """A tensor that `written` put on the disk."""
    from accelerate.utils import load_offloaded_weight

    assert placement.folder is not None
    tensor: torch.Tensor = load_offloaded_weight(str(Path(placement.folder.name) / f"{name}.dat"), index[name])
    return tensor
