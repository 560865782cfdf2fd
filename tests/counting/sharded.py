"""A second counter of tensor parallelism: transformers' own sharding of a tiny model, on meta tensors in one process.

`python tests/counting/sharded.py` compares all causal-LM types with it and writes the committed table again.

torch's fake process group (torch.testing) replaces the other ranks. It cuts DTensors and calls collectives as in a
group of that size, and sends nothing.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import scoreboard
import torch
import torch.distributed as dist
from shrink import shrink
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.initialization import no_tie_weights

from profiler.counting.memory_need import cache_bytes
from profiler.counting.operators import Collective
from profiler.counting.tensor_parallel import walk_rank
from profiler.facts.step import ExecutionPath, Step
from profiler.loading.meta_model import build_on_meta, quiet_libraries

TABLE = Path(__file__).with_name("sharded.csv")

BATCH, PROMPT = 2, 5
# Shorter than the windows of the tiny models: windowed layers of transformers keep one key less than the window.


@dataclass(frozen=True)
class Sharded:
    """The weights and messages of one rank under transformers' sharding. Figures of a step that cannot run are None."""

    weight_bytes: int
    sent: tuple[tuple[str, int], ...] | None
    """(kind, bytes of the whole result) of every collective of a prefill, sorted."""
    cache_bytes: int | None
    why: str = ""


@contextmanager
def group(ranks: int, rank: int = 0) -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def sharded(config: Any, mesh: Any) -> Sharded:
    """Split a model of `config` as transformers does, and run one prefill."""
    ranks = mesh.size()
    with quiet_libraries(), warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        with no_tie_weights():
            model: Any = build_on_meta(config, torch.bfloat16)
        plan = model._resolve_parallel_plans(DistributedConfig(tp_size=ranks))[0]
        apply_tensor_parallelism(model, mesh, plan)
        model.tie_weights()
        held = {id(param): _local(param) for param in model.parameters()}
        weight_bytes = sum(tensor.nbytes for tensor in held.values())
        ids = torch.zeros(BATCH, PROMPT, dtype=torch.long, device="meta")
        heard = _Heard(ranks)
        try:
            with heard:
                output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        except Exception as error:  # models that read a value of a meta tensor, or fail with their own plan
            return Sharded(weight_bytes, None, None, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    layers = getattr(getattr(output, "past_key_values", None), "layers", ())
    cached = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    cache_bytes = sum(_local(tensor).nbytes for tensor in cached if isinstance(tensor, torch.Tensor))
    return Sharded(weight_bytes, tuple(sorted(heard.sent)), cache_bytes)


class _Heard(TorchDispatchMode):
    """Records every collective: torch.distributed's own and DTensor's functional ones."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first: its collectives return here
        name = str(func)
        tensor = args[0] if args else None
        while isinstance(tensor, list | tuple) and tensor:
            tensor = tensor[0]
        if name in ("c10d.allreduce_.default", "_c10d_functional.all_reduce.default"):
            self.sent.append(("all_reduce", tensor.nbytes))
        elif name == "_c10d_functional.all_gather_into_tensor.default":
            self.sent.append(("all_gather", tensor.nbytes * self.ranks))
        elif "c10d" in name and "wait_tensor" not in name and "wrap_tensor" not in name:
            raise AssertionError(f"a collective without a rule: {name}")
        return func(*args, **(kwargs or {}))


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def counted(config: Any, ranks: int, rank: int = 0) -> Sharded:
    """Return the same figures, which the walk counts from the plan."""
    with quiet_libraries():
        model: Any = build_on_meta(config, torch.bfloat16)
    work = walk_rank(model, ranks, rank)
    step = Step(BATCH, PROMPT, 0)
    sent = [
        (operator.kind, int(operator.each(step, ExecutionPath()).link_bytes))
        for operator in work.operators
        if isinstance(operator, Collective)
        for _ in range(operator.count)
    ]
    weights = {id(param): param.nbytes for param in model.parameters()}
    return Sharded(sum(weights.values()), tuple(sorted(sent)), int(cache_bytes(work, BATCH, PROMPT)))


def difference(mine: Sharded, theirs: Sharded) -> str:
    """Describe the differences, only of weights if transformers' model does not run here."""
    differences = []
    if mine.weight_bytes != theirs.weight_bytes:
        differences.append(f"weights {mine.weight_bytes}, transformers {theirs.weight_bytes}")
    if theirs.sent is not None and mine.sent != theirs.sent:
        differences.append("collectives")
    if theirs.cache_bytes is not None and mine.cache_bytes != theirs.cache_bytes:
        differences.append(f"cache {mine.cache_bytes}, transformers {theirs.cache_bytes}")
    return "; ".join(differences)


def score(model_type: str, mesh: Any) -> tuple[str, str]:
    """Return (`equal` | `weights equal` | `differs` | `no plan` | `not built`, the parts or the reason)."""
    try:
        with quiet_libraries():
            config = shrink(AutoConfig.for_model(model_type))
            plan = getattr(build_on_meta(config, torch.bfloat16), "tp_plan", None)
    except Exception as error:
        return "not built", str(error).splitlines()[0][:100]
    if not plan:
        return "no plan", ""
    theirs = sharded(config, mesh)
    if words := difference(counted(config, mesh.size()), theirs):
        return "differs", words
    return ("equal", "") if theirs.sent is not None else ("weights equal", theirs.why[:100])


if __name__ == "__main__":
    with group(2) as mesh:
        scoreboard.write_table(TABLE, scoreboard.types(), partial(score, mesh=mesh))
