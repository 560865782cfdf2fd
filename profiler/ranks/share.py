"""Load one rank's share of a tensor parallel model: as transformers joins it, and as a standalone model."""

from __future__ import annotations

import copy
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler.device.clock import now_s
from profiler.errors import ModelError, RequestError, first_line
from profiler.loading.config import pretrained_location
from profiler.loading.load import first_call
from profiler.loading.meta_model import auto_class, from_config, quiet_libraries
from profiler.loading.random_weights import STD, as_loaded
from profiler.loading.request import LoadedModel, ModelRequest
from profiler.packages import need
from profiler.ranks.process_group import ProcessGroup


@dataclass(frozen=True)
class Share:
    """The share of a model on one rank."""

    joined: nn.Module
    """transformers' tensor parallel model; a step needs all ranks."""
    alone: LoadedModel
    """The rank's tensors as a narrower model that does not communicate."""


def load_share(request: ModelRequest, config: Any, group: ProcessGroup, skeleton: nn.Module) -> Share:
    """Load this rank's share, together with the other ranks. Fills `skeleton`, which is the share on meta.

    Raises ModelError if the checkpoint does not load over the ranks, RequestError if accelerate is missing.
    """
    need("accelerate", "loading a model")
    start_s = now_s()
    with quiet_libraries():
        try:
            joined = (_random if request.weights == "random" else _checkpoint)(request, config, group)
        except (RequestError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            name = request.source.name
            raise ModelError(f"{name} does not load over {group.size} ranks: {first_line(error)}.") from error
        joined.eval()
        _copy_mapped_slices(joined)
        _fill(skeleton, joined)
    load_s = now_s() - start_s
    with group.together():
        first_call_s = first_call(joined, request)
    return Share(
        joined,
        LoadedModel(
            module=skeleton,
            request=request,
            load_s=load_s,
            first_call_s=first_call_s,
            revision=getattr(joined.config, "_commit_hash", None),
        ),
    )


def _checkpoint(request: ModelRequest, config: Any, group: ProcessGroup) -> Any:
    """Load the rank's slices of the checkpoint (transformers 5.23, `distributed_config`)."""
    from transformers.distributed.configuration_utils import DistributedConfig

    where, extra = pretrained_location(request.source)
    if request.attn:
        extra["attn_implementation"] = request.attn
    return auto_class(config).from_pretrained(
        where,
        config=copy.deepcopy(config),
        dtype=request.dtype,
        distributed_config=DistributedConfig(tp_size=group.size),
        trust_remote_code=request.trust_remote_code,
        use_safetensors=None if request.allow_pickle else True,
        **extra,
    )


def _random(request: ModelRequest, config: Any, group: ProcessGroup) -> Any:
    """Build a sharded model with random weights. Each rank draws its own shards; replicated weights are equal."""
    from accelerate import init_empty_weights
    from torch.distributed.tensor import DTensor
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    from transformers.initialization import no_init_weights, no_tie_weights

    with init_empty_weights(include_buffers=False), no_init_weights(), no_tie_weights():
        module: Any = from_config(copy.deepcopy(config), request.dtype, request.attn)
    tp_plan = module._resolve_parallel_plans(DistributedConfig(tp_size=group.size))[0]
    apply_tensor_parallelism(module, group.mesh, tp_plan)
    module.tie_weights()
    parameters: dict[int, nn.Parameter] = {}
    for name, owner in module.named_modules():
        for key, param in list(owner.named_parameters(recurse=False)):
            if id(param) not in parameters:
                is_shard = isinstance(param, DTensor)
                local = param.to_local() if is_shard else param
                seed = zlib.crc32(f"{name}.{key}".encode()) + (group.rank if is_shard else 0)
                # Random values for matrices, ones for the weights of norms, and zeros for biases.
                values = torch.empty(local.shape, dtype=local.dtype, device=group.device)
                if values.is_floating_point() and values.dim() > 1:
                    values.normal_(std=STD, generator=torch.Generator(group.device).manual_seed(seed))
                else:
                    values.fill_(1.0 if values.is_floating_point() and key.endswith("weight") else 0.0)
                parameters[id(param)] = as_loaded(_shard_like(param, values) if is_shard else values)
            owner._parameters[key] = parameters[id(param)]
        for key, buffer in owner.named_buffers(recurse=False):
            owner._buffers[key] = buffer.to(group.device)
    return module


def _shard_like(param: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor with the layout of `param` whose local shard is `local`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _copy_mapped_slices(joined: nn.Module) -> None:
    """Copy each slice that is a view of a memory-mapped file (CPU), so that the rank's memory is its share only."""
    from torch.distributed.tensor import DTensor

    copies: dict[int, nn.Parameter] = {}
    for owner in joined.modules():
        for key, param in list(owner.named_parameters(recurse=False)):
            local = param.to_local() if isinstance(param, DTensor) else param.data
            if local.untyped_storage().nbytes() == local.nbytes:
                continue
            if id(param) not in copies:
                contiguous = local.clone(memory_format=torch.contiguous_format)
                copies[id(param)] = as_loaded(
                    _shard_like(param, contiguous) if isinstance(param, DTensor) else contiguous
                )
            owner._parameters[key] = copies[id(param)]


def _fill(module: Any, joined: Any) -> None:
    """Replace the meta tensors of `module` by the rank's tensors of `joined`. Raises ModelError if a shape differs."""
    from torch.distributed.tensor import DTensor

    sources = dict(joined.named_parameters(remove_duplicate=False))
    buffers = dict(joined.named_buffers(remove_duplicate=False))
    parameters: dict[int, nn.Parameter] = {}
    for name, owner in module.named_modules():
        prefix = f"{name}." if name else ""
        for key, param in list(owner.named_parameters(recurse=False)):
            source = sources[prefix + key]
            local = source.to_local() if isinstance(source, DTensor) else source.data
            if local.shape != param.shape:
                raise ModelError(
                    f"{prefix}{key} has the shape {tuple(local.shape)}, but the plan has {tuple(param.shape)}."
                )
            if id(source) not in parameters:
                # Without gradients, transformers passes a shard on as a tensor that does not require them, and torch
                # chooses another kernel for the LM head (`as_loaded`). The standalone model must run the same kernel.
                parameters[id(source)] = nn.Parameter(local, False) if isinstance(source, DTensor) else as_loaded(local)
            owner._parameters[key] = parameters[id(source)]
        for key, _ in list(owner.named_buffers(recurse=False)):
            owner._buffers[key] = buffers[prefix + key]
    rows = module.get_input_embeddings().weight.shape[0]

    def wrap_token_ids(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0] % rows, *args[1:])

    module.get_input_embeddings().register_forward_pre_hook(wrap_token_ids)
    module.eval()
