"""Copies of a script's model: in another dtype, without its quantisation, all of it in one place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from profiler.machine.memory import available_bytes
from profiler.watching.settings import in_turn

# A copy may take this share of the free memory.
_MEMORY_SHARE = 0.8
_WIDE = ("float32", "float64")
_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Copy:
    """A copy that may be faster, and how it is asked for."""

    id: str
    evidence: str
    change: str
    make: Callable[[], Any]


def other_copies(model: Any, dtype: str) -> Iterator[Copy]:
    """The copies that are worth a trial and that there is room for. `dtype` is what the script's calls ran in."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    room_bytes = _MEMORY_SHARE * available_bytes(model.device)
    if _is_spread(model):
        if weights * model.dtype.itemsize <= room_bytes:
            places = sorted({str(place) for place in model.hf_device_map.values()})
            spread = f"weights are spread over {', '.join(places)}"
            yield Copy(
                "offload",
                f"{spread}: {turns}" if (turns := in_turn(model)) else f"{spread}, and cross a link at every step",
                f'device_map={{"": "{model.device}"}}: there is room for all of them',
                lambda: _gathered(model),
            )
        return
    if getattr(model, "hf_quantizer", None) is not None:
        if weights * _dense_ratio(model) * 2 <= room_bytes:
            yield Copy(
                "slow-format",
                "weights are unpacked, or their products scaled, at every step",
                "leave the quantisation out where the model fits without: this kernel costs more than its bytes save",
                lambda: copy.deepcopy(model).dequantize(),
            )
        return
    name = _faster_dtype(model.device, dtype)
    if name and weights * getattr(torch, name).itemsize <= room_bytes:
        wide = dtype in _WIDE
        auto = ' or dtype="auto" for the checkpoint\'s own' if wide else ""
        yield Copy(
            "wide-dtype" if wide else "emulated-dtype",
            f"weights are {dtype}{'' if wide else ', for whose products this device has no units'}",
            f"dtype=torch.{name}{',' if auto else ''}{auto}",
            lambda: copy.deepcopy(model).to(getattr(torch, name)),
        )


def _faster_dtype(device: torch.device, dtype: str) -> str | None:
    """The dtype to try: 16 bits for 32, and for 16 bits that a CPU emulates what it has units for."""
    if dtype in _WIDE:
        return "bfloat16"
    if device.type != "cpu" or dtype not in _HALVES or _has_units(dtype):
        return None
    return "bfloat16" if _has_units("bfloat16") else "float32"


def _has_units(dtype: str) -> bool:
    """Whether this CPU multiplies matrices of these 16 bits by itself, as torch tells."""
    names = {
        "bfloat16": ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
        "float16": ("_is_amx_fp16_supported",),
    }
    return any(getattr(torch.cpu, name, lambda: False)() for name in names[dtype])


def _is_spread(model: Any) -> bool:
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    return len(places) > 1 or bool(places & {"disk"})


def _dense_ratio(model: Any) -> float:
    """Weights that an element of a packed parameter stands for, at most: two of 4 bits in a byte."""
    return 2.0 if any(parameter.dtype == torch.uint8 for parameter in model.parameters()) else 1.0


def _gathered(model: Any) -> Any:
    """A copy with all weights where it computes, and nothing of accelerate's hooks."""
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils import set_module_tensor_to_device

    device, whole = model.device, copy.deepcopy(model)
    for module in whole.modules():
        hooks = getattr(module, "_hf_hook", None)
        for hook in getattr(hooks, "hooks", (hooks,)):
            waiting = getattr(hook, "weights_map", None) or {}
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if tensor.is_meta:
                    set_module_tensor_to_device(module, name, device, value=waiting[name])
    remove_hook_from_module(whole, recurse=True)
    whole.__dict__.pop("hf_device_map", None)
    return whole.to(device)
