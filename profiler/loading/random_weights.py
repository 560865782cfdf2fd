"""Build models with random weights, in the layout that their format has after loading."""

import math
from typing import Any

import torch
from torch import nn

from profiler.loading.device_map import DeviceMap, OtherBytesOf, dispatch, plan_device_map
from profiler.loading.meta_model import from_config
from profiler.loading.request import ModelRequest
from profiler.quant.registry import FORMATS, library_of, quantise_modules

# Standard deviation of the initial weights of most models in transformers (`initializer_range`).
STD = 0.02


def build_random(
    request: ModelRequest, config: Any, other_bytes_of: OtherBytesOf
) -> tuple[nn.Module, DeviceMap | None]:
    """Return the model of `request` with random weights, and accelerate's placement if the model does not fit."""
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights
    from transformers.quantizers import AutoHfQuantizer

    # Parameters go to the meta device, so drawing their initial values would be wasted time.
    with init_empty_weights(include_buffers=False), no_init_weights():
        module = from_config(config, request.dtype, request.attn)
    module = quantise_modules(module, request.quant, request.dtype, request.quant_options, request.device)
    if (library := FORMATS[request.quant].library) is not None:  # `generate` asks the quantizer whether it may compile
        form = library().config(request.quant, request.dtype, request.quant_options, module, request.device)
        module.hf_quantizer = AutoHfQuantizer.from_config(form, pre_quantized=False)
    module.tie_weights()
    placement = plan_device_map(module, request.device, request.quant, other_bytes_of)
    torch.manual_seed(0)
    on_disk = _materialise(module, request.device, placement)
    module.tie_weights()
    if placement is not None:
        dispatch(module, placement, request.device, on_disk)
    return module, placement


def _materialise(module: nn.Module, device: torch.device, placement: DeviceMap | None) -> dict[str, Any]:
    """Replace meta parameters by random values, tied ones once; return the index of those written to disk."""
    from accelerate.utils import load_offloaded_weight, offload_weight

    folder = None if placement is None or placement.folder is None else placement.folder.name
    parameters: dict[int, nn.Parameter] = {}
    names: dict[int, str] = {}
    on_disk: dict[str, Any] = {}
    for name, owner in module.named_modules():
        target = device if placement is None else placement.device_of(name)
        template = dict(owner.named_parameters(recurse=False))
        needs_init = False
        for key, param in template.items():
            if id(param) not in parameters:
                device_or_cpu = target or torch.device("cpu")
                library = library_of(param)
                if library is None:  # NaN, so that `_init_values` can see whether transformers initialised it
                    values = torch.empty_like(param, device=device_or_cpu)
                    made = as_loaded(values.fill_(math.nan) if values.is_floating_point() else values)
                else:
                    made = library.random_weight(owner, device_or_cpu, STD)
                parameters[id(param)] = made
                names[id(param)] = f"{name}.{key}"
                needs_init = True
            elif folder is not None and parameters[id(param)].device.type == "meta":
                file = f"{folder}/{names[id(param)]}.dat"
                parameters[id(param)] = as_loaded(load_offloaded_weight(file, on_disk[names[id(param)]]))
            owner._parameters[key] = parameters[id(param)]
        if needs_init:
            _init_values(module, owner)
        if target is None:
            for key, param in template.items():
                offload_weight(owner._parameters[key].detach(), f"{name}.{key}", folder, on_disk)
                owner._parameters[key] = parameters[id(param)] = param
        for key, buffer in owner.named_buffers(recurse=False):
            owner._buffers[key] = buffer.to(target)
    return on_disk


def _init_values(module: Any, owner: nn.Module) -> None:
    """Initialise the parameters of `owner` as transformers does, and those that it leaves out with `STD` or zeros."""
    parameters = dict(owner.named_parameters(recurse=False))
    dense = [param for param in parameters.values() if library_of(param) is None]
    if len(dense) == len(parameters):
        with torch.no_grad():
            module._init_weights(owner)
    for param in dense:
        if param.is_floating_point() and param.sum().isnan():
            nn.init.normal_(param, std=STD) if param.dim() > 1 else nn.init.zeros_(param)


def as_loaded(values: torch.Tensor) -> nn.Parameter:
    """Return a weight as `from_pretrained` makes it (transformers/core_model_loading.py): it requires gradients.

    Only then torch's matmul folds a batch of last positions into one matmul, without copies of the weight (should_fold
    in aten/src/ATen/native/LinearAlgebra.cpp).
    """
    return nn.Parameter(values, requires_grad=values.is_floating_point())
