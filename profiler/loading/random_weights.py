"""Random weights of a config, drawn in the layout that its format loads."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from profiler.loading.device_map import DeviceMap, dispatch, plan_device_map, read_back, written
from profiler.loading.meta_model import from_config
from profiler.loading.request import ModelRequest
from profiler.quant.formats import quantise_modules


def build_random(request: ModelRequest, config: Any) -> tuple[nn.Module, DeviceMap | None]:
    """The model of `request` with random weights on its device, and accelerate's placement if it does not fit there."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), _skip_init():
        module = from_config(config, request.dtype, request.attn)
    module = quantise_modules(module, request.quant, request.dtype, request.quant_options, request.device)
    module.tie_weights()
    placement = plan_device_map(module, request.device, quantised=request.quant != "none")
    torch.manual_seed(0)
    on_disk = _materialise(module, request.device, placement)
    module.tie_weights()
    if placement is not None:
        dispatch(module, placement, request.device, on_disk)
    return module, placement


def _materialise(module: nn.Module, device: torch.device, placement: DeviceMap | None) -> dict[str, Any]:
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
                made[id(param)] = random_weight(owner, here) if is_quantised(key, param) else _unset(param, here)
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


# Standard deviation that transformers starts most models with (`initializer_range`).
STD = 0.02


def as_loaded(values: torch.Tensor) -> nn.Parameter:
    """A weight as `from_pretrained` leaves it (transformers/core_model_loading.py): one that could be trained.

    Gradients are never recorded here, but the kernel depends on it: where the weight could be trained, torch's matmul
    folds a batch of last positions into one product, and else makes a batched one of as many copies of the weight
    (should_fold in aten/src/ATen/native/LinearAlgebra.cpp).
    """
    return nn.Parameter(values, requires_grad=values.is_floating_point())


def is_quantised(key: str, param: Any) -> bool:
    """Whether the parameter `key` of a module is a weight in a format of `random_weight`."""
    return key == "weight" and type(param).__name__ in _RANDOM_WEIGHTS


def random_weight(owner: nn.Module, device: torch.device) -> nn.Parameter:
    """Random values for the planned, quantised weight of a linear layer, with a standard deviation of about `STD`.

    All codes of a format are equally likely, and all scales are equal.
    Storages, dtypes and shapes are those that quantising a dense matrix gives, as they are from the first step on.
    """
    return _RANDOM_WEIGHTS[type(owner.weight).__name__](owner, device)


def _four_bit(owner: Any, device: torch.device) -> nn.Parameter:
    """bitsandbytes' 4 bits: codes of a book of 16, and the absolute maximum of each block of weights.

    For a CPU's fused kernel they are drawn as its repacking leaves them (functional.py, 0.50: [outs, ins / 2] bytes,
    [ins / block, outs] bfloat16), which would take longer than all the drawing, and permutes what is random anyway.
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
        # What its inverse needs, which the library calls to save or move the layer.
        state.original_dtype, state.original_qshape = dtype, quantised_shape
        state.original_nested = bool(planned.compress_statistics)
        state.packing_format_for_cpu = True
    elif state.nested:
        state.absmax, state.state2 = quantize_blockwise(absmax, blocksize=_NESTED_BLOCK)
    data = _random(torch.empty((outs, ins // 2) if fused else quantised_shape, dtype=torch.uint8, device=device))
    options = {**planned.__dict__, "quant_state": state, "bnb_quantized": True}
    parameter = Params4bit(data, requires_grad=False, **options)
    if parameter.module is not None:
        parameter.module.quant_state = state
    return cast(nn.Parameter, parameter)


def _llm_int8(owner: Any, device: torch.device) -> nn.Parameter:
    """LLM.int8(): int8 with the absolute maximum of each row, which 127 stands for."""
    from bitsandbytes.nn import Int8Params

    data = _random(torch.empty(owner.out_features, owner.in_features, dtype=torch.int8, device=device))
    scales = torch.full((owner.out_features,), 127 * STD / _rms(_INT8), device=device)
    return cast(nn.Parameter, Int8Params(data, requires_grad=False, has_fp16_weights=False, CB=data, SCB=scales))


def _torchao(owner: Any, device: torch.device) -> nn.Parameter:
    """torchao: every inner tensor that the planned weight names, made on the device."""
    planned = owner.weight
    names, attributes = planned.__tensor_flatten__()
    tensors = {name: torch.empty_like(getattr(planned, name), device=device) for name in names}
    data = _random(tensors["qdata"])
    if data.dtype == torch.float8_e4m3fn:
        data.view(torch.uint8).bitwise_and_(_FLOAT8_MASK)
    scale = STD / _rms(_CODES[type(planned).__name__])
    if "zero_point" in tensors:
        tensors["zero_point"].zero_()
    if "scale" in tensors:
        tensors["scale"].fill_(scale)
    else:  # a pair a group: the value is (code - 8) * scale + zero
        tensors["scale_and_zero"][..., 0] = scale
        tensors["scale_and_zero"][..., 1] = scale / 2
    return nn.Parameter(type(planned).__tensor_unflatten__(tensors, attributes, None, None), requires_grad=False)


def _random(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` with bytes of every value: drawn eight at a time, which takes a sixth of the time."""
    data = tensor.view(-1).view(torch.uint8)
    data.zero_()  # fresh pages are touched by all threads here; drawing has one
    whole = len(data) // 8 * 8
    data[:whole].view(torch.int64).random_(-(2**63), None)
    data[whole:].random_(0, 256)
    return tensor


def _rms(codes: torch.Tensor) -> float:
    """Root mean square of a format's codes, all equally likely."""
    return float(codes.float().square().mean().sqrt())


# bitsandbytes/functional.py, `quantize_4bit`: blocks of the second level.
_NESTED_BLOCK = 256
# Leaves out the upper half of the exponents of float8_e4m3fn, where its NaN lie.
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
