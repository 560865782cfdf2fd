"""A model and one rank's share of it, of which the linears alone have weights: to be replayed in turn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler.grid import Grid, Phase
from profiler.loading.drawn import STD
from profiler.loading.request import LoadedModel, ModelRequest
from profiler.machine.machine import Machine
from profiler.probes.shortened import pattern_of, stack_of
from profiler.probes.subject import Subject
from profiler.roofs.values import Ceilings
from profiler.work.formats import model_storage_bytes
from profiler.work.step import ExecutionPath
from profiler.work.walk import linear_modules, walk


@dataclass(frozen=True)
class Bare:
    """How a model is replayed whose linears alone have weights."""

    request: ModelRequest
    machine: Machine
    paths: Mapping[tuple[str, Phase], ExecutionPath]
    grid: Grid

    def subject(self, module: nn.Module) -> Subject:
        """`module` (on meta) with random weights in its linears. Raises OutOfMemoryError where there is no room."""
        work = walk(module)
        return Subject(
            self.machine, LoadedModel(_filled(module, self.machine.device), self.request, 0.0), work, {}, self.paths,
            self.grid,
        )  # fmt: skip


def shorten(whole: Any, share: Any, ceilings: Ceilings) -> None:
    """Leave both (on meta) so many layers as no cache keeps the share's from step to step, or all.

    Their weights then come from where a step of all layers finds them, and no more memory is taken than that needs.
    """
    config = whole.config.get_text_config()
    pattern, layers = pattern_of(share, config), stack_of(share, config)
    if pattern is None or layers is None:
        return
    enough = max(pattern.short, math.ceil(ceilings.past_caches_bytes / model_storage_bytes(layers[0])))
    for stack in (stack_of(whole, config), layers):
        assert stack is not None, "both are one model"
        del stack[enough:]


def trained_alike(whole: nn.Module, share: nn.Module) -> None:
    """Let what `share` holds whole be trained as it can be in `whole`, and no cut weight, which transformers hands on
    as a tensor that cannot be: torch takes another kernel for it in the LM head (`loading.drawn.as_loaded`)."""
    held = dict(whole.named_parameters(remove_duplicate=False))
    for name, param in share.named_parameters(remove_duplicate=False):
        param.requires_grad_(param.shape == held[name].shape)


def _filled(module: nn.Module, device: torch.device) -> nn.Module:
    """Values are drawn for the first of equal linears, and copied for the others."""
    for owners in linear_modules(module).values():
        drawn: dict[str, torch.Tensor] = {}
        for owner in owners:
            for key, param in list(owner.named_parameters(recurse=False)):
                if key not in drawn:
                    drawn[key] = values = torch.empty_like(param, device=device).detach().normal_(std=STD)
                else:
                    values = drawn[key].clone()
                owner._parameters[key] = nn.Parameter(values, param.requires_grad)
    return module
