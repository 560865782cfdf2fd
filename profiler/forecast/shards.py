"""Time of a tensor-parallel shard's linears, scaled by the measured ratio of shard to whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from profiler.counting.tensor_parallel import walk_rank
from profiler.counting.walk import linear_modules, walk
from profiler.device.device import resolve_device
from profiler.device.machine import Machine, machine_for
from profiler.errors import DeviceError
from profiler.facts.measurements import Replays
from profiler.facts.roofs import Ceilings
from profiler.facts.run_facts import DeviceFacts
from profiler.facts.step import ExecutionPath
from profiler.forecast.command import ForecastRequest, RunFacts, meta_model_of, requested_grid
from profiler.grid.cells import CellKey, Grid, Phase
from profiler.loading.random_weights import STD
from profiler.loading.request import DTYPES, LoadedModel, ModelRequest
from profiler.loading.source import ModelSource
from profiler.measure.kernels import replay_between
from profiler.measure.short_model import pattern_of, stack_of
from profiler.measure.subject import Subject
from profiler.predict.kernel_times import KernelTimes, instance_roof_s
from profiler.predict.operator_arrays import Array, OperatorArrays, OperatorColumn, StepArrays, by_phase
from profiler.predict.predict import Fitted
from profiler.quant.storage import model_storage_bytes
from profiler.stats import undisturbed
from profiler.units import processors


@dataclass(frozen=True)
class ShardTime:
    """The kernels of a rank at the very steps that are forecast."""

    whole: KernelTimes
    """Kernel times of the whole model: attention, experts and small kernels keep their share of the roof."""
    alone_s: Mapping[str, Array]
    """[n], of one instance of a linear; NaN where neither it nor a step of that phase was replayed."""

    def small_s(self, steps: StepArrays, traffic_s: Array, from_memory_s: Array) -> Array:
        """Seconds as in the whole model: what is not cut keeps its time."""
        return self.whole.small_s(steps, traffic_s, from_memory_s)

    def seconds(self, column: OperatorColumn, steps: StepArrays, roof_s: Array) -> Array | None:
        """Seconds of one instance at each step, where its roof is `roof_s`; None for one that is not known."""
        kept_s, alone_s = self.whole.seconds(column, steps, roof_s), self.alone_s.get(column.operator)
        if kept_s is None or alone_s is None:
            return kept_s
        return np.where(np.isnan(alone_s), kept_s, np.maximum(roof_s, alone_s))

    def converting_s(self, column: OperatorColumn, steps: StepArrays, roof_s: Array) -> Array:
        """Seconds as in the whole model: what is not cut keeps its time."""
        return self.whole.converting_s(column, steps, roof_s)


def shard_times(
    fitted: Fitted, whole: OperatorArrays, keys: Sequence[CellKey], in_turn: Sequence[tuple[Replays, ...]]
) -> ShardTime:
    """A rank's kernels, from those of the whole model and what replays of both in turn say of their linears.

    `keys` are the steps of `whole` in their order; each pair of `in_turn` has the whole linears, then the rank's. Only
    their ratio is taken: the machine may be faster or slower than when the run was made.
    """
    at = {key: index for index, key in enumerate(keys)}
    replayed = [(pair[0].keys[0], _shares(*pair)) for pair in in_turn]
    found: dict[str, Array] = {}
    for column in whole.columns:
        points = [
            (key.phase, float(column.rows[at[key]]), shares[column.operator])
            for key, shares in replayed
            if column.operator in shares
        ]
        alone_s = fitted.kernels.seconds(column, whole.steps, instance_roof_s(column, whole, fitted.device))
        if points and alone_s is not None:
            found[column.operator] = alone_s * _share(column.rows, whole.steps, points)
    return ShardTime(fitted.kernels, found)


def _shares(whole: Replays, share: Replays) -> dict[str, float]:
    """By operator: the time of a rank's, as a share of the whole one's."""
    of_whole = {replay.operator: undisturbed(replay.seconds).quartile_s for replay in whole.operators}
    return {
        replay.operator: undisturbed(replay.seconds).quartile_s / of_whole[replay.operator]
        for replay in share.operators
    }


def _share(rows: Array, steps: StepArrays, points: Sequence[tuple[Phase, float, float]]) -> Array:
    """[n]: the share at each step, straight between the rows of `points` (phase, rows, share) and level beyond them.

    Each phase by itself: to the LM head the same rows come in another layout.
    """
    found = np.full(len(steps), np.nan)
    for phase, chosen in by_phase(steps):
        known = {count: share for of, count, share in sorted(points) if of == phase}
        if known:
            shares = np.interp(np.log(rows[chosen]), np.log([*known]), np.log([*known.values()]))
            found[chosen] = np.exp(shares)
    return found


SET_S = 10.0
"""For the linears of one number of cards."""


def machine_of(facts: DeviceFacts) -> Machine | str:
    """The device that a run was taken on, or why this is another one."""
    try:
        machine = machine_for(resolve_device(facts.kind))
    except DeviceError as error:
        return str(error).removesuffix(".")
    here = machine.info
    if here.name != facts.name:
        return f"this is {here.name}, and the run was on {facts.name}"
    if here.threads != facts.threads:
        return f"this has {processors(here.threads, here.kind)}, and the run had {facts.threads}"
    if here.compute_capability != facts.compute_capability:
        return f"this computes with {here.compute_capability}, and the run did with {facts.compute_capability}"
    return machine


def replay_shards(known: RunFacts, wanted: ForecastRequest, machine: Machine) -> ShardTime | str:
    """A rank's linears at the rows of the wanted steps, in turn with the whole ones; or why there are none.

    Raises RequestError for a model that cannot be cut so.
    """
    model, ceilings = known.facts.model, known.facts.ceilings
    whole, share = (meta_model_of(known.run.folder, known.run.document) for _ in range(2))
    walk_rank(share, wanted.ranks)
    trained_alike(whole, share)
    shorten(whole, share, ceilings)
    grid = requested_grid(known, wanted)
    request = ModelRequest(ModelSource("folder", model.id), machine.device, DTYPES[model.dtype])
    bare = ShardSubject(request, machine, {(known.engine, phase): path for phase, path in known.paths.items()}, grid)
    try:
        subjects = bare.subject(whole), bare.subject(share)
        in_turn = list(replay_between(subjects, grid.keys, ceilings, SET_S))
    except torch.OutOfMemoryError:
        return "the device has no room for them beside the whole ones"
    finally:
        machine.release()
    return shard_times(known.trained.fitted, known.demanded(StepArrays.of(grid.keys)), grid.keys, in_turn)


@dataclass(frozen=True)
class ShardSubject:
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
