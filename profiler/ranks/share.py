"""Load one rank's share of a tensor parallel model: as transformers joins it, and as a standalone model."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
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


def load_share(
    request: ModelRequest, config: Any, group: ProcessGroup, skeleton: nn.Module
) -> tuple[nn.Module, LoadedModel]:
    """Load this rank's share, together with the other ranks; `skeleton` is the share on meta.

    Returns transformers' tensor parallel model, of which a step needs all ranks, and `skeleton` with this rank's
    tensors, which does not communicate.

    Raises ModelError if the checkpoint does not load over the ranks, RequestError if accelerate is missing.
    """
    need("accelerate", "loading a model")
    start_s = now_s()
    with quiet_libraries():
        try:
            joined = (_random if request.weights == "random" else _checkpoint)(request, config, group)
            joined.eval()
            _fill(skeleton, joined)
        except (RequestError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            name = request.source.name
            raise ModelError(f"{name} does not load over {group.size} ranks: {first_line(error)}.") from error
    load_s = now_s() - start_s
    with group.together():
        first_call_s = first_call(joined, request)
    revision = getattr(joined.config, "_commit_hash", None)
    return joined, LoadedModel(skeleton, request, load_s, first_call_s=first_call_s, revision=revision)


def _checkpoint(request: ModelRequest, config: Any, group: ProcessGroup) -> Any:
    """Load the rank's slices of the checkpoint (transformers 5.23, `distributed_config`)."""
    from transformers.distributed.configuration_utils import DistributedConfig

    where, extra = pretrained_location(request.source)
    if request.attn:
        extra["attn_implementation"] = request.attn
    joined = auto_class(config).from_pretrained(
        where,
        config=copy.deepcopy(config),
        dtype=request.dtype,
        distributed_config=DistributedConfig(tp_size=group.size),
        trust_remote_code=request.trust_remote_code,
        use_safetensors=None if request.allow_pickle else True,
        **extra,
    )

    def own(_name: str, local: torch.Tensor, _is_shard: bool) -> torch.Tensor:
        """A copy of a slice that is a view of a memory-mapped file (CPU), so that memory holds the share only."""
        whole_bytes = local.untyped_storage().nbytes()
        return local if whole_bytes == local.nbytes else local.clone(memory_format=torch.contiguous_format)

    _replace_parameters(joined, own)
    return joined


def _random(request: ModelRequest, config: Any, group: ProcessGroup) -> Any:
    """Build a sharded model with random weights. Each rank draws its own shards; replicated weights are equal."""
    from accelerate import init_empty_weights
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    from transformers.initialization import no_init_weights, no_tie_weights

    with init_empty_weights(include_buffers=False), no_init_weights(), no_tie_weights():
        joined: Any = from_config(copy.deepcopy(config), request.dtype, request.attn)
    tp_plan = joined._resolve_parallel_plans(DistributedConfig(tp_size=group.size))[0]
    apply_tensor_parallelism(joined, group.mesh, tp_plan)
    joined.tie_weights()

    def drawn(name: str, local: torch.Tensor, is_shard: bool) -> torch.Tensor:
        """Random values for matrices, ones for the weights of norms, and zeros for biases."""
        values = torch.empty(local.shape, dtype=local.dtype, device=group.device)
        if values.dim() > 1:
            seed = zlib.crc32(name.encode()) + (group.rank if is_shard else 0)
            return values.normal_(std=STD, generator=torch.Generator(group.device).manual_seed(seed))
        return values.fill_(1.0 if name.endswith("weight") else 0.0)

    _replace_parameters(joined, drawn)
    for owner in joined.modules():
        for key, buffer in owner.named_buffers(recurse=False):
            owner._buffers[key] = buffer.to(group.device)
    return joined


def _replace_parameters(joined: nn.Module, values_of: Callable[[str, torch.Tensor, bool], torch.Tensor]) -> None:
    """Replace each parameter by the values for (its name, this rank's part, whether it is a shard); ties stay."""
    from torch.distributed.tensor import DTensor

    made: dict[int, nn.Parameter] = {}
    for name, owner in joined.named_modules():
        for key, param in list(owner.named_parameters(recurse=False)):
            if id(param) not in made:
                is_shard = isinstance(param, DTensor)
                values = values_of(f"{name}.{key}", param.to_local() if is_shard else param.data, is_shard)
                if is_shard:
                    layout = {"shape": param.shape, "stride": param.stride(), "run_check": False}
                    values = DTensor.from_local(values, param.device_mesh, param.placements, **layout)
                made[id(param)] = as_loaded(values)
            owner._parameters[key] = made[id(param)]


def _fill(skeleton: Any, joined: Any) -> None:
    """Replace the meta tensors of `skeleton` by the rank's tensors of `joined`.

    Without gradients, transformers passes a shard on as a tensor that does not require them, and torch chooses another
    kernel for the LM head (`as_loaded`). The standalone model must run the same kernel.
    """
    from torch.distributed.tensor import DTensor

    own: dict[int, nn.Parameter] = {}
    for name, source in joined.named_parameters(remove_duplicate=False):
        if id(source) not in own:
            is_shard = isinstance(source, DTensor)
            own[id(source)] = nn.Parameter(source.to_local(), False) if is_shard else as_loaded(source.data)
        owner, _, key = name.rpartition(".")
        module = skeleton.get_submodule(owner)
        if module._parameters[key].shape != own[id(source)].shape:
            raise ModelError(f"the shape of {name} is {tuple(own[id(source)].shape)}, not that of transformers' plan.")
        module._parameters[key] = own[id(source)]
    for name, buffer in joined.named_buffers(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        skeleton.get_submodule(owner)._buffers[key] = buffer
    embeddings = skeleton.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    embeddings.register_forward_pre_hook(lambda _, args: (args[0] % rows, *args[1:]))
    skeleton.eval()
