"""One rank's share of a model, cut and joined by transformers, and the same weights as a model of its own."""

from __future__ import annotations

import copy
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler.device.clock import now_s
from profiler.device.process_group import ProcessGroup
from profiler.errors import ModelError, RequestError, first_line
from profiler.loading.config import pretrained_location
from profiler.loading.load import first_call
from profiler.loading.meta_model import from_config, quiet_libraries
from profiler.loading.random_weights import STD, as_loaded
from profiler.loading.request import LoadedModel, ModelRequest
from profiler.packages import need


@dataclass(frozen=True)
class Share:
    """What one rank holds."""

    joined: nn.Module
    """transformers' own tensor parallel model: a step of it needs all ranks."""
    alone: LoadedModel
    """The rank's tensors as a narrower model that exchanges nothing."""


def load_share(request: ModelRequest, config: Any, group: ProcessGroup, skeleton: nn.Module) -> Share:
    """Load this rank's share, in step with the others; `skeleton` is that share without its bytes, and is filled.

    Raises ModelError when the checkpoint does not load so, RequestError where accelerate is missing.
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
        _own_memory(joined)
        _fill(skeleton, joined)
    loaded_s = now_s() - start_s
    with group.together():
        spent_s = first_call(joined, request)
    return Share(
        joined,
        LoadedModel(
            module=skeleton,
            request=request,
            load_s=loaded_s,
            first_call_s=spent_s,
            revision=getattr(joined.config, "_commit_hash", None),
        ),
    )


def _checkpoint(request: ModelRequest, config: Any, group: ProcessGroup) -> Any:
    """Each rank reads its own slices of the checkpoint (transformers 5.23, `distributed_config`)."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    where, extra = pretrained_location(request.source)
    if request.attn:
        extra["attn_implementation"] = request.attn
    return AutoModelForCausalLM.from_pretrained(
        where,
        config=copy.deepcopy(config),
        dtype=request.dtype,
        distributed_config=DistributedConfig(tp_size=group.size),
        trust_remote_code=request.trust_remote_code,
        use_safetensors=None if request.allow_pickle else True,
        **extra,
    )


def _random(request: ModelRequest, config: Any, group: ProcessGroup) -> Any:
    """Cut a model with random weights: each rank draws its own pieces, and equal values for what all hold."""
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
    made: dict[int, nn.Parameter] = {}
    for name, owner in module.named_modules():
        for key, param in list(owner.named_parameters(recurse=False)):
            if id(param) not in made:
                cut = isinstance(param, DTensor)
                local = param.to_local() if cut else param
                seed = zlib.crc32(f"{name}.{key}".encode()) + (group.rank if cut else 0)
                values = _drawn(local, key, seed, group.device)
                if cut:
                    shape, stride = param.shape, param.stride()
                    values = DTensor.from_local(
                        values, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride
                    )
                made[id(param)] = as_loaded(values)
            owner._parameters[key] = made[id(param)]
        for key, buffer in owner.named_buffers(recurse=False):
            owner._buffers[key] = buffer.to(group.device)
    return module


def _drawn(planned: torch.Tensor, key: str, seed: int, device: torch.device) -> torch.Tensor:
    """Small random matrices, weights of norms that are one, biases that are nothing."""
    values = torch.empty(planned.shape, dtype=planned.dtype, device=device)
    if not values.is_floating_point():
        return values.zero_()
    if values.dim() > 1:
        return values.normal_(std=STD, generator=torch.Generator(device).manual_seed(seed))
    return values.fill_(1.0 if key.endswith("weight") else 0.0)


def _own_memory(joined: nn.Module) -> None:
    """Copy each slice that is still a view of the whole in a mapped file (CPU): a rank holds its share alone."""
    from torch.distributed.tensor import DTensor

    copied: dict[int, nn.Parameter] = {}
    for owner in joined.modules():
        for key, param in list(owner.named_parameters(recurse=False)):
            local = param.to_local() if isinstance(param, DTensor) else param.data
            if local.untyped_storage().nbytes() == local.nbytes:
                continue
            if id(param) not in copied:
                own = local.clone(memory_format=torch.contiguous_format)
                if isinstance(param, DTensor):
                    own = DTensor.from_local(
                        own, param.device_mesh, param.placements, run_check=False, shape=param.shape,
                        stride=param.stride(),
                    )  # fmt: skip
                copied[id(param)] = as_loaded(own)
            owner._parameters[key] = copied[id(param)]


def _fill(module: Any, joined: Any) -> None:
    """Give a skeleton the tensors that the joined model holds here. Raises ModelError where a shape differs."""
    from torch.distributed.tensor import DTensor

    held = dict(joined.named_parameters(remove_duplicate=False))
    buffers = dict(joined.named_buffers(remove_duplicate=False))
    filled: dict[int, nn.Parameter] = {}
    for name, owner in module.named_modules():
        prefix = f"{name}." if name else ""
        for key, param in list(owner.named_parameters(recurse=False)):
            own = held[prefix + key]
            local = own.to_local() if isinstance(own, DTensor) else own.data
            if local.shape != param.shape:
                planned, found = tuple(param.shape), tuple(local.shape)
                raise ModelError(f"{prefix}{key} is {found} here and not {planned}, as its plan says.")
            if id(own) not in filled:
                # Without gradients transformers hands a cut weight on as a tensor that could not be trained, for which
                # torch takes another kernel in the LM head (`as_loaded`): here is to run what runs there.
                filled[id(own)] = nn.Parameter(local, False) if isinstance(own, DTensor) else as_loaded(local)
            owner._parameters[key] = filled[id(own)]
        for key, _ in list(owner.named_buffers(recurse=False)):
            owner._buffers[key] = buffers[prefix + key]
    rows = module.get_input_embeddings().weight.shape[0]

    def own_rows(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0] % rows, *args[1:])

    module.get_input_embeddings().register_forward_pre_hook(own_rows)
    module.eval()
