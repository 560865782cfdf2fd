"""Times of a tensor-parallel shard's linears, from replays of the shard in turn with the whole model."""

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
from profiler.forecast.command import ForecastRequest, RunFacts, meta_model_of, requested_grid
from profiler.grid.cells import CellKey, Phase
from profiler.loading.prompts import Prompts
from profiler.loading.random_weights import STD
from profiler.loading.request import DTYPES, LoadedModel, ModelRequest
from profiler.loading.source import ModelSource
from profiler.measure.kernels import replay_between
from profiler.measure.subject import Subject
from profiler.measure.trials import pattern_of, stack_of
from profiler.predict.kernel_times import KernelTimes, instance_roof_s
from profiler.predict.operator_arrays import Array, OperatorArrays, OperatorColumn, StepArrays, by_phase
from profiler.predict.predict import FittedModel
from profiler.quant.storage import model_storage_bytes
from profiler.stats import undisturbed
from profiler.units import processors


@dataclass(frozen=True)
class ShardTime(KernelTimes):
    """Kernel times of a rank, at the n steps that are forecast and no others."""

    whole: KernelTimes
    """Kernel times of the whole model, whose share of the roof attention, experts and small kernels keep."""
    alone_s: Mapping[str, Array]
    """By linear, seconds [n] of one instance of the shard; NaN in a phase without replays."""

    def small_s(self, steps: StepArrays, traffic_s: Array, from_memory_s: Array) -> Array:
        """Seconds [n] of all small kernels of each step, as in the whole model, since they are not sharded."""
        return self.whole.small_s(steps, traffic_s, from_memory_s)

    def seconds(self, column: OperatorColumn, steps: StepArrays, roof_s: Array) -> Array | None:
        """Seconds [n] of one instance at each step with roofs `roof_s` [n]; None for an unknown operator."""
        whole_s, shard_s = self.whole.seconds(column, steps, roof_s), self.alone_s.get(column.operator)
        if whole_s is None or shard_s is None:
            return whole_s
        return np.where(np.isnan(shard_s), whole_s, np.maximum(roof_s, shard_s))

    def converting_s(self, column: OperatorColumn, steps: StepArrays) -> Array:
        """Seconds [n] of one instance that are spent converting between formats, as in the whole model."""
        return self.whole.converting_s(column, steps)


def shard_times(
    fitted: FittedModel, whole: OperatorArrays, keys: Sequence[CellKey], in_turn: Sequence[tuple[Replays, ...]]
) -> ShardTime:
    """A rank's kernel times: those of the whole model, with linears scaled by the measured ratio of shard to whole.

    `keys` are the steps of `whole` in order. Each pair of `in_turn` has the replays of the whole linears, then those of
    the rank's. Only their ratio is used, since the machine may be faster or slower than during the run.
    """
    index_of = {key: index for index, key in enumerate(keys)}
    ratios_by_key = [(pair[0].keys[0], _ratios(*pair)) for pair in in_turn]
    shard_s: dict[str, Array] = {}
    for column in whole.columns:
        points = [
            (key.phase, float(column.rows[index_of[key]]), ratios[column.operator])
            for key, ratios in ratios_by_key
            if column.operator in ratios
        ]
        whole_s = fitted.kernels.seconds(column, whole.steps, instance_roof_s(column, whole, fitted.device))
        if points and whole_s is not None:
            shard_s[column.operator] = whole_s * _interpolated(column.rows, whole.steps, points)
    return ShardTime(fitted.kernels, shard_s)


def _ratios(whole: Replays, shard: Replays) -> dict[str, float]:
    """By operator, the time of the shard over that of the whole linear."""
    whole_s = {replay.operator: undisturbed(replay.seconds).quartile_s for replay in whole.operators}
    return {
        replay.operator: undisturbed(replay.seconds).quartile_s / whole_s[replay.operator] for replay in shard.operators
    }


def _interpolated(rows: Array, steps: StepArrays, points: Sequence[tuple[Phase, float, float]]) -> Array:
    """The ratio [n] at each step, log-linear between the rows of `points` (phase, rows, ratio), constant beyond them.

    Phases are separate, since the LM head gets the same number of rows in a different layout. NaN without points.
    """
    ratios = np.full(len(steps), np.nan)
    for phase, chosen in by_phase(steps):
        by_rows = {count: ratio for point_phase, count, ratio in sorted(points) if point_phase == phase}
        if by_rows:
            log_ratios = np.interp(np.log(rows[chosen]), np.log([*by_rows]), np.log([*by_rows.values()]))
            ratios[chosen] = np.exp(log_ratios)
    return ratios


SET_S = 10.0
"""Seconds to replay the linears for one number of GPUs."""


def machine_of(facts: DeviceFacts) -> Machine | str:
    """The device of a run, if it is this machine's; otherwise the reason why it is not."""
    try:
        machine = machine_for(resolve_device(facts.kind))
    except DeviceError as error:
        return str(error).removesuffix(".")
    here = machine.info
    if here.name != facts.name:
        return f"this device is {here.name}, and the run was on {facts.name}"
    if here.threads != facts.threads:
        return f"this device has {processors(here.threads, here.kind)}, and the run had {facts.threads}"
    if here.compute_capability != facts.compute_capability:
        return f"this device has {here.compute_capability}, and the run had {facts.compute_capability}"
    return machine


def replay_shards(basis: RunFacts, request: ForecastRequest, machine: Machine) -> ShardTime | str:
    """Replay a rank's linears at the requested steps, in turn with the whole ones; or the reason why it failed.

    Raises RequestError for a model that cannot be split over the requested number of ranks.
    """
    model, ceilings = basis.facts.model, basis.facts.ceilings
    whole, share = (meta_model_of(basis.run.folder, basis.run.document) for _ in range(2))
    walk_rank(share, request.ranks)
    trained_alike(whole, share)
    shorten(whole, share, ceilings)
    grid = requested_grid(basis, request)
    model_request = ModelRequest(ModelSource("folder", model.id), machine.device, DTYPES[model.dtype])
    paths = {(basis.engine, phase): path for phase, path in basis.paths.items()}

    prompts = Prompts(whole.config.get_text_config().vocab_size)

    def subject(module: nn.Module) -> Subject:
        work, loaded = walk(module), LoadedModel(_filled(module, machine.device), model_request, 0.0)
        return Subject(machine, loaded, work, {}, paths, grid, prompts)

    try:
        subjects = subject(whole), subject(share)
        in_turn = list(replay_between(subjects, grid.keys, ceilings, SET_S))
    except torch.OutOfMemoryError:
        return "the device has no memory for them next to the whole ones"
    finally:
        machine.release()
    return shard_times(basis.trained.fitted, basis.demanded(StepArrays.of(grid.keys)), grid.keys, in_turn)


def shorten(whole: Any, share: Any, ceilings: Ceilings) -> None:
    """Remove layers of both models (on meta), but leave so many that no cache holds the share's weights between steps.

    The weights then come from memory, as in a step of all layers, without the memory that all layers need.
    """
    config = whole.config.get_text_config()
    pattern, layers = pattern_of(share, config), stack_of(share, config)
    if pattern is None or layers is None:
        return
    layer_count = max(pattern.short, math.ceil(ceilings.past_caches_bytes / model_storage_bytes(layers[0])))
    for stack in (stack_of(whole, config), layers):
        assert stack is not None, "both have the architecture of the share"
        del stack[layer_count:]


def trained_alike(whole: nn.Module, share: nn.Module) -> None:
    """Set `requires_grad` in `share` for parameters that are not cut, and clear it for those that are.

    transformers' sharding gives cut weights as tensors without gradients, for which torch uses another kernel in the LM
    head (`loading.random_weights.as_loaded`).
    """
    whole_params = dict(whole.named_parameters(remove_duplicate=False))
    for name, param in share.named_parameters(remove_duplicate=False):
        param.requires_grad_(param.shape == whole_params[name].shape)


def _filled(module: nn.Module, device: torch.device) -> nn.Module:
    """`module` (on meta) with random values in its linears, drawn once per set of equal ones and copied to the others.

    Raises OutOfMemoryError if they do not fit.
    """
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
