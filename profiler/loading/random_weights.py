"""Random weights: any model built tensor by tensor on its device, in its final dtype and format."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from profiler.loading.placement import Placement, dispatch, place, read_back, written
from profiler.loading.quantise import TORCHAO_WEIGHTS, config_of, quantise_linears, quantise_modules
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
    """Give every meta parameter its random values on its own device, a tied one once, a quantised one quantised.

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
                values = torch.empty(_dense_shape(owner, key, param), dtype=_dense_dtype(owner, param), device=target)
                made[id(param)] = nn.Parameter(values, requires_grad=False)
                names[id(param)] = f"{name}.{key}"
                fresh = True
            elif made[id(param)].device.type == "meta" and placement is not None:
                made[id(param)] = nn.Parameter(read_back(names[id(param)], placement, on_disk), requires_grad=False)
            owner._parameters[key] = made[id(param)]
            if fresh and _is_quantised(key, param):
                nn.init.normal_(owner._parameters[key], std=0.02)
                made[id(param)] = _QUANTISERS[param.__class__.__name__](owner, param, target)
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


def _init_values(module: Any, owner: nn.Module) -> None:
    """Start values as transformers draws them; what it leaves alone is drawn here, so that nothing stays unset."""
    for key, param in owner._parameters.items():
        if param is not None and param.is_floating_point() and not _is_quantised(key, param):
            nn.init.normal_(param, std=0.02) if param.dim() > 1 else nn.init.zeros_(param)
    if not any(_is_quantised(key, param) for key, param in owner._parameters.items()):
        with torch.no_grad():
            module._init_weights(owner)


def _is_quantised(key: str, param: Any) -> bool:
    return key == "weight" and type(param).__name__ in _QUANTISERS


def _dense_shape(owner: nn.Module, key: str, param: nn.Parameter) -> tuple[int, ...]:
    if _is_quantised(key, param):
        return (owner.out_features, owner.in_features)
    return tuple(param.shape)


def _dense_dtype(owner: nn.Module, param: nn.Parameter) -> torch.dtype:
    if param.is_floating_point():
        return param.dtype
    return getattr(owner, "compute_dtype", None) or torch.float16


def _quantised_4bit(owner: nn.Module, template: Any, device: torch.device) -> nn.Parameter:
    """Quantise a few rows at a time: the library's CPU kernel takes about a hundred bytes a weight while it works."""
    from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise
    from bitsandbytes.nn import Params4bit

    dense: torch.Tensor = owner.weight.data
    packed, scales, state = [], [], None
    for rows in dense.split(_ROWS_A_SLICE):
        data, state = quantize_4bit(
            rows.contiguous(),
            blocksize=template.blocksize,
            compress_statistics=False,
            quant_type=template.quant_type,
            quant_storage=template.quant_storage,
        )
        packed.append(data)
        scales.append(state.absmax)
    absmax, nested = torch.cat(scales), {}
    if template.compress_statistics:  # the second level runs over the scales of the whole matrix, as in quantize_4bit
        offset = absmax.mean()
        absmax, second = quantize_blockwise(absmax - offset, blocksize=_NESTED_BLOCK)
        nested = {"offset": offset, "state2": second}
    whole = QuantState(
        absmax=absmax,
        shape=dense.shape,
        code=state.code if state else None,
        blocksize=template.blocksize,
        quant_type=template.quant_type,
        dtype=dense.dtype,
        **nested,
    )
    options = {**template.__dict__, "quant_state": whole, "bnb_quantized": True}
    parameter = Params4bit(torch.cat(packed), requires_grad=False, **options)
    if parameter.module is not None:
        parameter.module.quant_state = whole
    return parameter


def _quantised_int8(owner: nn.Module, template: Any, device: torch.device) -> nn.Parameter:
    from bitsandbytes.nn import Int8Params

    # Int8Params quantises on the way from the host to the device, and only there.
    return Int8Params(owner.weight.data.cpu(), requires_grad=False, has_fp16_weights=template.has_fp16_weights).to(
        device
    )


def _quantised_by_torchao(owner: nn.Module, template: Any, device: torch.device) -> nn.Parameter:
    quantise_linears(nn.Sequential(owner), config_of(template))
    return cast(nn.Parameter, owner.weight)


# bitsandbytes/functional.py, quantize_4bit: blocks of the second level.
_NESTED_BLOCK = 256
# A multiple of every block size, so that no block of scales is cut.
_ROWS_A_SLICE = 256

_QUANTISERS = {
    "Params4bit": _quantised_4bit,
    "Int8Params": _quantised_int8,
    **dict.fromkeys(TORCHAO_WEIGHTS, _quantised_by_torchao),
}


@contextlib.contextmanager
def _skip_init() -> Iterator[None]:
    """Leave new parameters unset: they are on their way to the meta device, so drawing values would be lost time."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights
    with no_init_weights():
        yield
