"""Load a model onto its device."""

import contextlib
import copy
import functools
import weakref
from typing import Any

import torch
from torch import nn

from profiler.device.clock import clock_for, now_s
from profiler.errors import ModelError
from profiler.loading.config import pretrained_location
from profiler.loading.device_map import DeviceMap, OtherBytesOf, offloaded_bytes, plan_device_map
from profiler.loading.meta_model import auto_class, plan, quiet_libraries
from profiler.loading.random_weights import build_random
from profiler.loading.request import CheckpointFit, LoadedModel, ModelRequest, model_errors
from profiler.packages import need
from profiler.patching import patched
from profiler.quant.checkpoints import gguf_format, published_format
from profiler.quant.registry import FORMATS

# Dtypes with several weights per element. int64 is not one of them: positions use it.
_PACKED_IN = (torch.int32, torch.int8, torch.uint8)


def load(request: ModelRequest, config: Any, other_bytes_of: OtherBytesOf = lambda _: 0) -> LoadedModel:
    """Load the model of `request` on its device, in evaluation mode. accelerate places a model that does not fit.

    It fits with the bytes that `other_bytes_of` returns for it on meta. Random weights are made in their final format,
    so no full-precision copy ever exists. Raises ModelError if it does not load, RequestError without a package.
    """
    need("accelerate", "loading a model")
    start_s = now_s()
    with quiet_libraries(), model_errors(f"{request.source.name} does not load"):
        try:
            if request.weights == "random":
                (module, placement), fit = build_random(request, config, other_bytes_of), CheckpointFit()
            else:
                module, placement, fit = _load_checkpoint(request, config, other_bytes_of)
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
    failed = f"{request.source.name} loads, but does not run"
    with model_errors(failed), torch.inference_mode(), quiet_libraries():
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
    if placement is not None and placement.folder is not None:
        extra["offload_folder"] = placement.folder.name
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
            trust_remote_code=request.trust_remote_code,
            use_safetensors=None if request.allow_pickle else True,
            **{"dtype": request.dtype, **extra, **request.arguments},
        )
    return module, placement, CheckpointFit(tuple(sorted(info["missing_keys"])), tuple(sorted(info["unexpected_keys"])))
