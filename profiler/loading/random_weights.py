"""Random weights: any model built tensor by tensor on its device, in its final dtype and format."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from profiler.loading.placement import as_text, auto_device_map, mapped_device
from profiler.loading.request import ModelRequest
from profiler.loading.skeleton import from_config, quantise_modules


def build_random(request: ModelRequest, config: Any) -> tuple[nn.Module, dict[str, str] | None]:
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), _skip_init():
        module = from_config(config, request.dtype, request.attn)
    module = quantise_modules(module, request.quant, request.dtype)
    module.tie_weights()
    device_map = auto_device_map(module, request.device)
    torch.manual_seed(0)
    _materialise(module, request.device, device_map)
    module.tie_weights()
    if device_map is not None:
        from accelerate import dispatch_model

        dispatch_model(module, device_map, main_device=request.device, force_hooks=True)
    return module, as_text(device_map)


def _materialise(module: nn.Module, device: torch.device, device_map: dict[str, Any] | None) -> None:
    """Give every meta parameter its random values on its own device, a tied one once, a quantised one quantised."""
    made: dict[int, nn.Parameter] = {}
    for name, owner in module.named_modules():
        target = device if device_map is None else mapped_device(name, device_map)
        fresh = False
        for key, param in list(owner.named_parameters(recurse=False)):
            if id(param) not in made:
                values = torch.empty(_dense_shape(owner, key, param), dtype=_dense_dtype(owner, param), device=target)
                made[id(param)] = nn.Parameter(values, requires_grad=False)
                fresh = True
            owner._parameters[key] = made[id(param)]
            if fresh and key == "weight" and param.__class__.__name__ in _QUANTISERS:
                nn.init.normal_(owner._parameters[key], std=0.02)
                owner._parameters[key] = _QUANTISERS[param.__class__.__name__](owner, param, target)
        if fresh:
            _init_values(module, owner)
        for key, buffer in owner.named_buffers(recurse=False):
            owner._buffers[key] = buffer.to(target)


def _init_values(module: Any, owner: nn.Module) -> None:
    """Start values as transformers draws them; what it leaves alone is drawn here, so that nothing stays unset."""
    for param in owner._parameters.values():
        if param is not None and param.is_floating_point() and not hasattr(param, "quant_state"):
            nn.init.normal_(param, std=0.02) if param.dim() > 1 else nn.init.zeros_(param)
    if not any(param.__class__.__name__ in _QUANTISERS for param in owner._parameters.values()):
        with torch.no_grad():
            module._init_weights(owner)


def _dense_shape(owner: nn.Module, key: str, param: nn.Parameter) -> tuple[int, ...]:
    if key == "weight" and param.__class__.__name__ in _QUANTISERS:
        return (owner.out_features, owner.in_features)
    return tuple(param.shape)


def _dense_dtype(owner: nn.Module, param: nn.Parameter) -> torch.dtype:
    if param.is_floating_point():
        return param.dtype
    return getattr(owner, "compute_dtype", None) or torch.float16


def _quantised_4bit(owner: nn.Module, template: Any, device: torch.device) -> nn.Parameter:
    from bitsandbytes.nn import Params4bit

    return Params4bit(owner.weight.data, requires_grad=False, **template.__dict__).to(device)


def _quantised_int8(owner: nn.Module, template: Any, device: torch.device) -> nn.Parameter:
    from bitsandbytes.nn import Int8Params

    # Int8Params quantises on the way from the host to the device, and only there.
    return Int8Params(owner.weight.data.cpu(), requires_grad=False, has_fp16_weights=template.has_fp16_weights).to(
        device
    )


_QUANTISERS = {"Params4bit": _quantised_4bit, "Int8Params": _quantised_int8}


@contextlib.contextmanager
def _skip_init() -> Iterator[None]:
    """Leave new parameters unset: they are on their way to the meta device, so drawing values would be lost time."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights
    with no_init_weights():
        yield
