"""Load one rank's share of a tensor parallel model: as transformers joins it, and as a standalone model."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from profiler.counting.operators import ModelWork
from profiler.counting.tensor_parallel import walk_rank
from profiler.device.clock import now_s
from profiler.errors import ModelError
from profiler.loading.config import pretrained_location
from profiler.loading.load import first_call
from profiler.loading.meta_model import plan, quiet_libraries
from profiler.loading.random_weights import as_loaded
from profiler.loading.request import LoadedModel, ModelRequest, model_errors
from profiler.packages import need
from profiler.ranks.process_group import ProcessGroup


def load_share(request: ModelRequest, config: Any, group: ProcessGroup) -> tuple[nn.Module, LoadedModel, ModelWork]:
    """Load and count this rank's share: the joined model and a standalone one. Raises ModelError, RequestError."""
    need("accelerate", "loading a model")
    start_s = now_s()
    with quiet_libraries():
        share: Any = plan(request, copy.deepcopy(config))
        work = walk_rank(share, group.size, group.rank)
        with model_errors(f"{request.source.name} does not load over {group.size} ranks"):
            joined = _joined(share, request, group)
            _fill(share, joined)
    load_s = now_s() - start_s
    with group.together():
        first_call_s = first_call(joined, request)
    revision = getattr(joined.config, "_commit_hash", None)
    return joined, LoadedModel(share, request, load_s, first_call_s=first_call_s, revision=revision), work


def _joined(share: Any, request: ModelRequest, group: ProcessGroup) -> Any:
    """Load the rank's slices (transformers 5.23, `distributed_config`). Random weights fill an empty checkpoint."""
    from transformers.distributed.configuration_utils import DistributedConfig

    is_random = request.weights == "random"
    where, extra = (None, {"state_dict": {}}) if is_random else pretrained_location(request.source)
    torch.manual_seed(group.rank)
    joined = type(share).from_pretrained(
        where,
        config=copy.deepcopy(share.config),
        dtype=request.dtype,
        distributed_config=DistributedConfig(tp_size=group.size),
        trust_remote_code=request.trust_remote_code,
        use_safetensors=None if request.allow_pickle else True,
        **extra,
    )
    with torch.no_grad():
        for param in joined.parameters():
            local = param._local_tensor if isinstance(param, DTensor) else param  # `to_local` makes a view of it
            if is_random and local is param:
                dist.broadcast(local.data, src=0)  # as in a checkpoint, every rank has the same copy of what is not cut
            elif local.untyped_storage().nbytes() != local.nbytes:
                # On a CPU a slice is a view of a memory-mapped file; memory must hold the share only.
                local.data = local.clone(memory_format=torch.contiguous_format)
    return joined.eval()


def _fill(share: Any, joined: Any) -> None:
    """Replace the meta tensors of `share` by those of `joined`; a shard requires no gradients (`as_loaded`)."""
    own: dict[int, nn.Parameter] = {}
    for name, source in joined.named_parameters(remove_duplicate=False):
        if id(source) not in own:
            is_shard = isinstance(source, DTensor)
            own[id(source)] = nn.Parameter(source.to_local(), False) if is_shard else as_loaded(source.data)
        owner, _, key = name.rpartition(".")
        module = share.get_submodule(owner)
        if getattr(module, key).shape != own[id(source)].shape:
            raise ModelError(f"the shape of {name} is {tuple(own[id(source)].shape)}, not that of transformers' plan.")
        setattr(module, key, own[id(source)])
    for name, buffer in joined.named_buffers(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        setattr(share.get_submodule(owner), key, buffer)
    embeddings = share.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    embeddings.register_forward_pre_hook(lambda _, args: (args[0] % rows, *args[1:]))
    share.eval()
