"""Build models with random weights, in the layout that their format has after loading."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from profiler.loading.device_map import (
    DeviceMap,
    OtherBytesOf,
    dispatch,
    plan_device_map,
    read_back,
    written,
)
from profiler.loading.meta_model import from_config
from profiler.loading.request import ModelRequest
from profiler.quant.formats import quantise_modules


def build_random(
    request: ModelRequest, config: Any, other_bytes_of: OtherBytesOf
) -> tuple[nn.Module, DeviceMap | None]:
    """Return the model of `request` with random weights, and accelerate's placement if the model does not fit."""
    from accelerate import init_empty_weights

    # Parameters go to the meta device, so drawing their initial values would be wasted time.
    with init_empty_weights(include_buffers=False), _no_init_weights():
        module = from_config(config, request.dtype, request.attn)
    module = quantise_modules(module, request.quant, request.dtype, request.quant_options, request.device)
    module.tie_weights()
    placement = plan_device_map(
        module, request.device, quantised=request.quant != "none", other_bytes=other_bytes_of(module)
    )
    torch.manual_seed(0)
    on_disk = _materialise(module, request.device, placement)
    module.tie_weights()
    if placement is not None:
        dispatch(module, placement, request.device, on_disk)
    return module, placement


def _materialise(module: nn.Module, device: torch.device, placement: DeviceMap | None) -> dict[str, Any]:
    """Replace every meta parameter by random values on its device. Tied parameters are made once.

    Weights for the disk are written at once and stay on meta. Returns the index of the tensors on disk.
    """
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
                parameters[id(param)] = (
                    random_weight(owner, device_or_cpu) if is_quantised(key, param) else _nan_like(param, device_or_cpu)
                )
                names[id(param)] = f"{name}.{key}"
                needs_init = True
            elif parameters[id(param)].device.type == "meta" and placement is not None:
                parameters[id(param)] = as_loaded(read_back(names[id(param)], placement, on_disk))
            owner._parameters[key] = parameters[id(param)]
        if needs_init:
            _init_values(module, owner)
        if target is None and placement is not None:
            for key, param in template.items():
                written(owner._parameters[key], f"{name}.{key}", placement, on_disk)
                owner._parameters[key] = parameters[id(param)] = param
        for key, buffer in owner.named_buffers(recurse=False):
            owner._buffers[key] = buffer.to(target)
    return on_disk


def _nan_like(planned: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a parameter of NaN, so that `_init_values` can see whether transformers initialised it."""
    values = torch.empty_like(planned, device=device)
    return as_loaded(values.fill_(math.nan) if values.is_floating_point() else values)


def _init_values(module: Any, owner: nn.Module) -> None:
    """Initialise the parameters of `owner` as transformers does, and those that it leaves out with `STD` or zeros."""
    parameters = dict(owner.named_parameters(recurse=False))
    dense = [param for key, param in parameters.items() if not is_quantised(key, param)]
    if len(dense) == len(parameters):
        with torch.no_grad():
            module._init_weights(owner)
    for param in dense:
        if param.is_floating_point() and param.sum().isnan():
            nn.init.normal_(param, std=STD) if param.dim() > 1 else nn.init.zeros_(param)


def _no_init_weights() -> contextlib.AbstractContextManager[None]:
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights
    return cast(contextlib.AbstractContextManager[None], no_init_weights())


# Standard deviation of the initial weights of most models in transformers (`initializer_range`).
STD = 0.02


def as_loaded(values: torch.Tensor) -> nn.Parameter:
    """Return a weight as `from_pretrained` makes it (transformers/core_model_loading.py): it requires gradients.

    roofscope never records gradients, but the choice of kernel depends on the flag. With it, torch's matmul folds a
    batch of last positions into one product. Without it, torch makes a batched product with copies of the weight
    (should_fold in aten/src/ATen/native/LinearAlgebra.cpp).
    """
    return nn.Parameter(values, requires_grad=values.is_floating_point())


def is_quantised(key: str, param: Any) -> bool:
    """Return whether the parameter `key` of a module is a weight in a format of `random_weight`."""
    return key == "weight" and type(param).__name__ in _RANDOM_WEIGHTS


def random_weight(owner: nn.Module, device: torch.device) -> nn.Parameter:
    """Return random values for the quantised weight of a linear layer, with a standard deviation of about `STD`.

    All codes of the format are equally likely, and all scales are equal. Storages, dtypes and shapes are those of a
    quantised dense matrix after the first step.
    """
    return _RANDOM_WEIGHTS[type(owner.weight).__name__](owner, device)


def _four_bit(owner: Any, device: torch.device) -> nn.Parameter:
    """Return a bitsandbytes 4-bit weight: 16 codes, and the absolute maximum of each block.

    For a CPU's fused kernel the data is drawn in the repacked layout (functional.py, 0.50: [outs, ins / 2] bytes,
    [ins / block, outs] bfloat16). Repacking would take longer than drawing, and only permutes random codes.
    """
    from bitsandbytes.functional import QuantState, get_4bit_type, quantize_blockwise
    from bitsandbytes.nn import Params4bit

    planned, outs, ins = owner.weight, owner.out_features, owner.in_features
    dtype, fused = owner.compute_dtype, owner.support_avx512bf16_for_cpu
    quantised_shape = torch.Size([math.ceil(outs * ins / 2), 1])
    code = get_4bit_type(planned.quant_type, device=device)
    absmax = torch.full((math.ceil(outs * ins / planned.blocksize),), STD / _rms(code), device=device)
    state = QuantState(
        absmax=absmax,
        shape=torch.Size([outs, ins]),
        code=code,
        blocksize=planned.blocksize,
        quant_type=planned.quant_type,
        dtype=dtype,
    )
    if planned.compress_statistics:
        state.offset = torch.zeros((), device=device)
        state.nested = not fused
    if fused:
        state.absmax = absmax.to(torch.bfloat16).view(-1, outs)
        state.dtype = torch.bfloat16
        # The library's inverse needs these to save or move the layer.
        state.original_dtype, state.original_qshape = dtype, quantised_shape
        state.original_nested = bool(planned.compress_statistics)
        state.packing_format_for_cpu = True
    elif state.nested:
        state.absmax, state.state2 = quantize_blockwise(absmax, blocksize=_NESTED_BLOCK)
    data = _fill_random(torch.empty((outs, ins // 2) if fused else quantised_shape, dtype=torch.uint8, device=device))
    options = {**planned.__dict__, "quant_state": state, "bnb_quantized": True}
    parameter = Params4bit(data, requires_grad=False, **options)
    if parameter.module is not None:
        parameter.module.quant_state = state
    return cast(nn.Parameter, parameter)


def _llm_int8(owner: Any, device: torch.device) -> nn.Parameter:
    """Return an LLM.int8() weight: int8, where 127 is the absolute maximum of its row."""
    from bitsandbytes.nn import Int8Params

    data = _fill_random(torch.empty(owner.out_features, owner.in_features, dtype=torch.int8, device=device))
    scales = torch.full((owner.out_features,), 127 * STD / _rms(_INT8), device=device)
    return cast(nn.Parameter, Int8Params(data, requires_grad=False, has_fp16_weights=False, CB=data, SCB=scales))


def _torchao(owner: Any, device: torch.device) -> nn.Parameter:
    """Return a torchao weight with the inner tensors of the planned one."""
    planned = owner.weight
    names, attributes = planned.__tensor_flatten__()
    tensors = {name: torch.empty_like(getattr(planned, name), device=device) for name in names}
    data = _fill_random(tensors["qdata"])
    if data.dtype == torch.float8_e4m3fn:
        data.view(torch.uint8).bitwise_and_(_FLOAT8_MASK)
    scale = STD / _rms(_CODES[type(planned).__name__])
    if "zero_point" in tensors:
        tensors["zero_point"].zero_()
    if "scale" in tensors:
        tensors["scale"].fill_(scale)
    else:  # a pair per group: the value is (code - 8) * scale + zero
        tensors["scale_and_zero"][..., 0] = scale
        tensors["scale_and_zero"][..., 1] = scale / 2
    return nn.Parameter(type(planned).__tensor_unflatten__(tensors, attributes, None, None), requires_grad=False)


def _fill_random(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` with random bytes. Drawing eight bytes at a time takes a sixth of the time."""
    data = tensor.view(-1).view(torch.uint8)
    data.zero_()  # all threads touch the new pages here; drawing uses one thread
    whole = len(data) // 8 * 8
    data[:whole].view(torch.int64).random_(-(2**63), None)
    data[whole:].random_(0, 256)
    return tensor


def _rms(codes: torch.Tensor) -> float:
    """Return the root mean square of a format's codes, each equally likely."""
    return float(codes.float().square().mean().sqrt())


# Block size of the second level (bitsandbytes/functional.py, `quantize_4bit`).
_NESTED_BLOCK = 256
# Excludes the upper half of the exponents of float8_e4m3fn, which includes NaN.
_FLOAT8_MASK = 0b1011_1111
_INT8 = torch.arange(-128, 128)
_INT4 = torch.arange(-8, 8) + 0.5
_FLOAT8 = torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn)

_CODES = {
    "Int8Tensor": _INT8,
    "Float8Tensor": _FLOAT8,
    "Int4OpaqueTensor": _INT4,
    "Int4TilePackedTo4dTensor": _INT4,
}
_RANDOM_WEIGHTS: dict[str, Callable[[Any, torch.device], nn.Parameter]] = {
    "Params4bit": _four_bit,
    "Int8Params": _llm_int8,
    **dict.fromkeys(_CODES, _torchao),
}
