"""One of several equal simulated cards that share a model, with a link of known truth.

This process is rank 0. The others have the same card and the same share, so no rank waits for another. A collective is
a kernel that takes alpha + S x (busbw / algbw) / bandwidth. torch.distributed and transformers' hooks are replaced. The
new hooks follow transformers' plan. `tests/ranks` compares both with real ranks (gloo).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from profiler.counting.tensor_parallel import _SENDS
from profiler.counting.walk import collapse_numbers
from profiler.data.links import CollectiveKind, bus_share
from profiler.loading.request import LoadedModel, ModelRequest
from profiler.ranks.process_group import ProcessGroup, _Peer
from profiler.ranks.share import Share

from .card import Card, Work


@dataclass(frozen=True)
class LinkTruth:
    """The truth of a link."""

    alpha_s: float
    bus_bytes_per_s: float

    def seconds(self, kind: CollectiveKind, nbytes: float, ranks: int) -> float:
        return self.alpha_s + nbytes * bus_share(kind, ranks) / self.bus_bytes_per_s


class SimulatedGroup(ProcessGroup):
    """Rank 0 of `size` equal cards."""

    def __init__(self, size: int) -> None:
        self.device = torch.device("cuda", 0)
        self.rank, self.size = 0, size
        self._orders = None
        self._peers = [_Peer("host", number) for number in range(size)]

    def order(self, order: object) -> None:
        """Return without waiting: the other ranks do the same at the same time."""

    def lost(self) -> tuple[int, ...]:
        return ()


@contextlib.contextmanager
def linked(card: Card, link: LinkTruth, size: int) -> Iterator[SimulatedGroup]:
    """Make `card` one of `size` equal cards with this link, within the context."""

    def all_reduce(tensor: torch.Tensor, *_: object, group: object = card, **__: object) -> None:
        if group is card:  # figures of the host use a separate group and cost nothing
            card.launch(Work("all_reduce", link_s=link.seconds("all_reduce", tensor.nbytes, size)))

    def all_gather(tensor: torch.Tensor, gather_dim: int, *_: object) -> torch.Tensor:
        # NCCL writes the pieces where they belong, so the gather needs no other kernel.
        whole = tensor.new_empty([extent * (size if at == gather_dim else 1) for at, extent in enumerate(tensor.shape)])
        card.launch(Work("all_gather", link_s=link.seconds("all_gather", whole.nbytes, size)))
        return whole

    with (
        mock.patch.object(dist, "all_reduce", all_reduce),
        mock.patch.object(dist, "broadcast"),
        mock.patch.object(functional, "all_gather_tensor", all_gather),
        mock.patch("profiler.ranks.run.load_share", _share),
    ):
        yield SimulatedGroup(size)


def _share(request: ModelRequest, config: Any, group: ProcessGroup, skeleton: nn.Module) -> Share:
    """Return a share whose joined model sends data after each module, as transformers' plan says."""
    alone: Any = skeleton.to_empty(device=group.device).eval()
    rows = alone.get_input_embeddings().weight.shape[0]
    alone.get_input_embeddings().register_forward_pre_hook(lambda _, args: (args[0] % rows, *args[1:]))
    joined = copy.deepcopy(alone, {id(tensor): tensor for tensor in (*alone.parameters(), *alone.buffers())})
    for name, module in joined.named_modules():
        kind = _SENDS.get(joined.tp_plan.get(collapse_numbers(name), ""))
        if kind is not None:
            module.register_forward_hook(_summed if kind == "all_reduce" else _gathered)
    return Share(joined, LoadedModel(alone, request, 0.0))


def _summed(module: nn.Module, args: object, output: torch.Tensor) -> None:
    dist.all_reduce(output)


def _gathered(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return functional.all_gather_tensor(output, output.dim() - 1, None)
