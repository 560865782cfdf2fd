"""Random weights: any model built tensor by tensor on its device, in its final dtype and format."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from profiler.loading.drawn import STD, as_loaded, draw, is_quantised
from profiler.loading.placement import Placement, dispatch, place, read_back, written
from profiler.loading.quantise import quantise_modules
from profiler.loading.request import ModelRequest
from profiler.loading.skeleton import from_config


def build_random(request: ModelRequest, config: Any) -> tuple[nn.Module, Placement | None]:
    """The model of `request` with random weights on its device, and accelerate's placement if it does not fit there."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), _skip_init():
        module = from_config(config, request.dtype, request.attn)
    module = quantise_modules(module, request.quant, request.dtype, request.quant_options, request.device)
    module.tie_weights()
    placement = place(module, request.device, quantised=request.quant != "none")
    torch.manual_seed(0)
    on_disk = _materialise(module, request.device, placement)
    module.tie_weights()
    if placement is not None:
        dispatch(module, placement, request.device, on_disk)
    return module, placement


def _materialise(module: nn.Module, device: torch.device, placement: Placement | None) -> dict[str, Any]:
    """Give every meta parameter its random values on its own device, a tied one once, a quantised one as it is stored.

    What belongs on the disk is written there at once and stays on meta; the index of those tensors is returned.
    """
    made: dict[int, nn.Parameter] = {}
    names: dict[int, str] = {}
    on_disk: dict[str, Any] = {}
    for name, owner in module.named_modules():
        target = device if placement is None else placement.device_of(name)
        template = dict(owner.named_parameters(recurse=False))
        fresh = False
        for key, param in template.items():
            if id(param) not in made:
                here = target or torch.device("cpu")
                made[id(param)] = draw(owner, here) if is_quantised(key, param) else _unset(param, here)
                names[id(param)] = f"{name}.{key}"
                fresh = True
            elif made[id(param)].device.type == "meta" and placement is not None:
                made[id(param)] = as_loaded(read_back(names[id(param)], placement, on_disk))
            owner._parameters[key] = made[id(param)]
        if fresh:
            _init_values(module, owner)
        if target is None and placement is not None:
            for key, param in template.items():
                written(owner._parameters[key], f"{name}.{key}", placement, on_disk)
                owner._parameters[key] = made[id(param)] = param
        for key, buffer in owner.named_buffers(recurse=False):
            owner._buffers[key] = buffer.to(target)
    return on_disk


def _unset(planned: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter like the planned one, all NaN: what is still so after its start values were drawn got none."""
    values = torch.empty_like(planned, device=device)
    return as_loaded(values.fill_(math.nan) if values.is_floating_point() else values)


def _init_values(module: Any, owner: nn.Module) -> None:
    """Start values as transformers draws them; what it leaves alone is drawn here, so that nothing stays unset."""
    own = dict(owner.named_parameters(recurse=False))
    dense = [param for key, param in own.items() if not is_quantised(key, param)]
    if len(dense) == len(own):
        with torch.no_grad():
            module._init_weights(owner)
    for param in dense:
        if param.is_floating_point() and param.sum().isnan():
            nn.init.normal_(param, std=STD) if param.dim() > 1 else nn.init.zeros_(param)


@contextlib.contextmanager
def _skip_init() -> Iterator[None]:
    """Leave new parameters unset: they are on their way to the meta device, so drawing values would be lost time."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights
    with no_init_weights():
        yield
