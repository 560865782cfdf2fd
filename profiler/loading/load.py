"""Load a model onto its device: a checkpoint, or random weights in the layout that their format has after loading."""

import contextlib
import copy
import functools
import math
import weakref
from typing import Any

import torch
from torch import nn

from profiler.device.clock import clock_for, now_s
from profiler.errors import ModelError
from profiler.loading.config import pretrained_location
from profiler.loading.device_map import DeviceMap, OtherBytesOf, dispatch, offloaded_bytes, plan_device_map
from profiler.loading.meta_model import auto_class, from_config, plan, quiet_libraries
from profiler.loading.request import CheckpointFit, LoadedModel, ModelRequest, model_errors
from profiler.patching import patched
from profiler.quant.checkpoints import gguf_format, published_format
from profiler.quant.registry import FORMATS, library_of, quantise_modules

# Standard deviation of the initial weights of most models in transformers (`initializer_range`).
STD = 0.02
# Dtypes with several weights per element. int64 is not one of them: positions use it.
_PACKED_IN = (torch.int32, torch.int8, torch.uint8)


def load(request: ModelRequest, config: Any, other_bytes_of: OtherBytesOf = lambda _: 0) -> LoadedModel:
    """Load the model of `request` on its device, in evaluation mode. accelerate places a model that does not fit.

    It fits with the bytes that `other_bytes_of` returns for it on meta. Random weights are made in their final format,
    so no full-precision copy ever exists. Raises ModelError if it does not load.
    """
    start_s = now_s()
    with quiet_libraries(), model_errors(f"{request.source.name} does not load"):
        try:
            make = _build_random if request.weights == "random" else _load_checkpoint
            module, placement, fit = make(request, config, other_bytes_of)
        except OSError as error:
            if request.source.path is not None:
                raise
            raise ModelError(
                f"no checkpoint of {request.source.hub_id} is in the local cache, and the hub provides none"
                " (offline, gated, or without safetensors); use --weights random to build the model without one."
            ) from error
    if placement is not None and placement.folder is not None:
        weakref.finalize(module, placement.folder.cleanup)  # the folder lives as long as the model does
    module.eval()
    return LoadedModel(
        module=module,
        request=request,
        load_s=now_s() - start_s,
        first_call_s=first_call(module, request),
        revision=getattr(module.config, "_commit_hash", None),
        placement=placement,
        unpacked_from=_unpacked_from(request, config, module),
        offloaded_bytes=offloaded_bytes(module, placement),
        fit=fit,
    )


def _unpacked_from(request: ModelRequest, config: Any, module: nn.Module) -> str | None:
    if request.quant != "none":
        return None
    tensors = [*module.parameters(), *module.buffers()]
    if any((tensor.is_floating_point() and tensor.itemsize == 1) or tensor.dtype in _PACKED_IN for tensor in tensors):
        return None
    if any(hasattr(part, "gate_up_proj_precision_config") for part in module.modules()):
        return None  # MXFP4 in triton's own tensors, which are not parameters (integrations/mxfp4.py)
    if request.source.kind == "gguf" and request.source.path is not None:
        file = gguf_format(request.source.path)
        return file.name if file.types else None
    return published_format(config)


def first_call(module: nn.Module, request: ModelRequest) -> float:
    """Run the very first forward pass, of one token, and return its seconds. Raises ModelError if it fails.

    Bytes must not be counted before: in it LLM.int8() moves its scales, bitsandbytes repacks 4 bits for a CPU's fused
    kernel, and compressed-tensors unpacks its weights.
    """
    start_s = now_s()
    with model_errors(f"{request.source.name} loads, but does not run"), torch.inference_mode(), quiet_libraries():
        module(input_ids=torch.zeros(1, 1, dtype=torch.long, device=request.device))
    clock_for(request.device).synchronize()
    return now_s() - start_s


def _load_checkpoint(
    request: ModelRequest, config: Any, other_bytes_of: OtherBytesOf
) -> tuple[nn.Module, DeviceMap | None, CheckpointFit]:
    where, extra = pretrained_location(request.source)
    if request.attn:
        extra["attn_implementation"] = request.attn
    planned = plan(request, copy.deepcopy(config))
    if (library := FORMATS[request.quant].library) is not None:
        extra["quantization_config"] = library().config(
            request.quant, request.dtype, request.quant_options, planned, request.device
        )
    placement = plan_device_map(planned, request.device, request.quant, other_bytes_of)
    del planned
    with contextlib.ExitStack() as stack:
        if request.source.kind == "gguf":
            import gguf

            # transformers (5.23, modeling_gguf_pytorch_utils.py) builds the map of tensor names for every module: 397
            # times for 30 layers, a third of the load time of SmolLM2-135M.
            stack.enter_context(patched(gguf, get_tensor_name_map=functools.cache(gguf.get_tensor_name_map)))
        module, info = auto_class(config).from_pretrained(
            where,
            config=config,
            output_loading_info=True,
            device_map=placement.device_map if placement else {"": request.device},
            offload_folder=placement.folder.name if placement and placement.folder else None,
            trust_remote_code=request.trust_remote_code,
            use_safetensors=None if request.allow_pickle else True,
            **{"dtype": request.dtype, **extra, **request.arguments},
        )
    return module, placement, CheckpointFit(tuple(sorted(info["missing_keys"])), tuple(sorted(info["unexpected_keys"])))


def _build_random(
    request: ModelRequest, config: Any, other_bytes_of: OtherBytesOf
) -> tuple[nn.Module, DeviceMap | None, CheckpointFit]:
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
    return module, placement, CheckpointFit()


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
        needs_init = any(id(param) not in parameters for param in template.values())
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
