"""Where a model's parts go when they do not all fit on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from profiler.errors import ModelError
from profiler.memory import available_bytes

# A device that is filled to the last byte cannot run a step; accelerate's own maps keep about as much back.
_FILL_LIMIT = 0.9


def auto_device_map(module: nn.Module, device: torch.device) -> dict[str, Any] | None:
    """accelerate's placement over this device and the host when the weights do not fit on the device, else None."""
    room = int(available_bytes(device) * _FILL_LIMIT)
    need = planned_weight_bytes(module)
    if need <= room:
        return None
    if device.type == "cpu":
        raise ModelError(
            f"the weights need {need / 1e9:.1f} GB, but {available_bytes(device) / 1e9:.1f} GB of memory is free;"
            " use a 16-bit --dtype, --quant nf4, or a smaller model."
        )
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_max_memory

    no_split = list(getattr(module, "_no_split_modules", None) or [])
    device_map: dict[str, Any] = infer_auto_device_map(module, get_max_memory(), no_split)
    if "disk" in device_map.values():
        raise ModelError(
            f"the weights need {need / 1e9:.1f} GB, more than this device and the host have together;"
            " use a 16-bit --dtype, --quant nf4, or a smaller model."
        )
    return device_map


def planned_weight_bytes(module: nn.Module) -> int:
    total = 0
    seen: set[int] = set()
    for owner in module.modules():
        for key, param in owner.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            kind = param.__class__.__name__
            size = param.numel() * param.element_size()
            if key == "weight" and kind == "Params4bit":
                size = owner.in_features * owner.out_features * 9 // 16  # 4.5 bits a weight: 4 + 32/64 of absmax
            elif key == "weight" and kind == "Int8Params":
                size = owner.in_features * owner.out_features
            total += size
    return total


def mapped_device(name: str, device_map: dict[str, Any]) -> torch.device:
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        placed = device_map.get(".".join(parts[:end]))
        if placed is not None:
            return torch.device("cuda", placed) if isinstance(placed, int) else torch.device(placed)
    return torch.device("cpu")


def as_text(device_map: dict[str, Any] | None) -> dict[str, str] | None:
    return None if device_map is None else {name: str(device) for name, device in device_map.items()}
