"""Load the model and measure what all cells depend on: roofs, dispatch, links."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from profiler import effort
from profiler.counting.chosen_kernel import path_here
from profiler.counting.memory_need import cache_bytes, memory_need
from profiler.counting.operators import ModelWork
from profiler.counting.walk import walk
from profiler.device.contention import Neighbours
from profiler.device.device import Device
from profiler.device.machine import Machine
from profiler.engines.base import Engine
from profiler.engines.registry import ENGINES, OWNING
from profiler.engines.transformers import PaddedEngine
from profiler.errors import ModelError, RoofscopeError, describe_error, first_line
from profiler.facts.dispatch import DispatchSamples
from profiler.facts.roofs import Ceilings, swing
from profiler.facts.step import ExecutionPath, Step
from profiler.facts.telemetry import Contention
from profiler.grid.cells import PHASES, Grid
from profiler.grid.ragged import PADDED_ENGINE
from profiler.loading.load import load
from profiler.loading.request import LoadedModel, ModelRequest, dtype_name
from profiler.measure.dispatch import measure_dispatch
from profiler.measure.subject import Subject, execution_paths
from profiler.quant.bitsandbytes import four_bit_rule_error
from profiler.quant.registry import FORMATS
from profiler.roofs.bandwidth import measure_links, measure_weights
from profiler.roofs.fixed_work import PROBE_BYTES, DriftProbe
from profiler.roofs.measure import cached, measure
from profiler.roofs.sampler import attempt
from profiler.run.default_grid import Pace, choose_grid, measure_pace
from profiler.run.fact_log import FactLog
from profiler.run.stages import RunBudget, RunPart, Stages
from profiler.run.validate import PreparedRun

LOOK, UNSEEN = "the check for other processes", "busy processes are not detected"
"""Name of this part and the effect of its failure, for `Stages.optional`."""
_LOOK_S = 0.5
"""Seconds between two looks at other processes."""
_CHECK_EVERY_S = 2.0
"""Time between checks of the machine, each of which takes a quarter of a second on a CPU."""
_WITNESS_SHARE = 0.08
"""Share of the time of the ceilings for reading the model's own weights."""
_DRIFT = "the drift probe", "a change in the machine's own speed is not detected"
_DISPATCH = "dispatch on the hollow twin", "the host's share of a step is unexplained"


def load_subject(prepared: PreparedRun, stages: Stages) -> Subject:
    """Load the model, make its engines, and count the work of its steps, by the kernels that this device chooses.

    Raises ModelError for a model that does not load, whatever the reason.
    """
    request, machine = prepared.request, stages.machine
    before_bytes = machine.allocated_bytes()  # of this process's other models, as in a notebook
    stages.begin("loading", f"loading {request.source.name} ({dtype_name(request.dtype)}, {request.weights} weights)")
    try:
        loaded = load(
            request,
            prepared.config,
            lambda module: bytes_without_weights(module, request, prepared.smallest),
        )
    except RoofscopeError:
        raise
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{request.source.name} does not fit on {request.device}: {first_line(error)}; use --quant nf4 or a"
            " smaller model."
        ) from error
    except Exception as error:
        raise ModelError(
            f"{request.source.name} does not load on {request.device}: {describe_error(error)}."
        ) from error
    work = walk(loaded.module)
    for name in OWNING.keys() & set(prepared.grid.engines):
        stages.begin(f"loading into {name}", f"{name} loads the model, compiles it and warms up")
    engines = make_engines(prepared, loaded, work, machine)
    held_bytes = machine.allocated_bytes() - before_bytes
    if FORMATS[request.quant].has_options and (why := four_bit_rule_error(machine.device)):
        stages.miss("bitsandbytes' choice of 4-bit kernels", why, "dense copies are counted from 5 rows on")
    subject = Subject(machine, loaded, work, engines, {}, prepared.grid, prepared.prompts, held_bytes)
    return on_grid(subject, prepared.grid, stages)


def on_grid(subject: Subject, grid: Grid, stages: Stages) -> Subject:
    """Return the subject of this grid, whose longest prompt decides the kernels."""
    paths = {(name, phase): ExecutionPath() for name in subject.engines for phase in PHASES}
    with stages.optional("the choice of kernels", "work is counted as if the fastest ran"):
        paths = execution_paths(subject.loaded, subject.work, subject.engines, grid, subject.prompts)
    return replace(subject, grid=grid, paths=paths)


def wait_for_neighbours(neighbours: Neighbours, stages: Stages, budget: RunBudget) -> list[Contention]:
    """Wait, for at most `budget.neighbours_s`, until no other process keeps cores busy that this run needs.

    Returns what still disturbs the run; empty if nothing does.
    """
    threads, most_s = stages.machine.info.host_threads, budget.neighbours_s
    others = neighbours.look()
    if not others.disturbs(threads):
        return []
    looks = int(most_s / _LOOK_S)
    if looks:
        stages.begin(
            "waiting",
            f"{others.busy_cores} busy with {others.who}: waiting at most {most_s:.0f} s for that to end",
        )
    for _ in range(looks):
        time.sleep(_LOOK_S)
        others = neighbours.look()
        if not others.disturbs(threads):
            return []
    return [others]


class MachineChecks:
    """Looks at the machine's own speed and at other processes between visits, at most every `_CHECK_EVERY_S`."""

    def __init__(self, machine: Machine, ledger: FactLog, stages: Stages, neighbours: Neighbours | None) -> None:
        self._machine, self._ledger, self._stages, self._neighbours = machine, ledger, stages, neighbours
        self._checked_s = -math.inf
        self._probe = stages.tried(*_DRIFT, partial(DriftProbe, machine))  # there may be no room for its buffers

    def swing(self) -> float:
        """Return how much the machine's own speed has varied so far, as a share."""
        if self._machine.now_s() - self._checked_s > _CHECK_EVERY_S:
            if self._probe is not None:
                with self._stages.optional(*_DRIFT):
                    self._ledger.add(self._probe.look())
            if self._neighbours is not None:
                with self._stages.optional(LOOK, UNSEEN):
                    contention = self._neighbours.look()
                    if contention.disturbs(self._machine.info.host_threads):
                        self._ledger.add(contention)
            self._checked_s = self._machine.now_s()
        return swing(self._ledger.gathered.looks, on_gpu=self._machine.is_cuda)


def measure_device(
    prepared: PreparedRun, subject: Subject, stages: Stages, budget: RunBudget, *, busy: bool
) -> Ceilings:
    """Measure the roofs, and the links to offloaded weights.

    `busy` says that other processes disturb: roofs are then neither checked nor measured on the model's weights.
    """
    machine, loaded, budget_s = subject.machine, subject.loaded, budget.part_s(RunPart.CEILINGS)
    stages.begin("roofs", "measuring this device's roofs")
    roofs_s, fresh = (1 - _WITNESS_SHARE) * budget_s, prepared.options.fresh
    ceilings = measure_ceilings(subject.request, machine, subject.work, roofs_s, fresh=fresh, busy=busy)
    links, missing = measure_links(sorted(loaded.offloaded_bytes), machine)
    weights = None
    if not busy:
        with attempt("the model's own weights", machine, missing):
            weights = measure_weights(loaded.module.parameters(), machine, _WITNESS_SHARE * budget_s)
    ceilings = replace(ceilings, links=links, weights=weights, missing={**ceilings.missing, **missing})
    for name, why in ceilings.missing.items():
        stages.miss(f"measuring {name}", why, "this roof is missing")
    return ceilings


def set_grid(
    prepared: PreparedRun, subject: Subject, ceilings: Ceilings, stages: Stages, budget: RunBudget
) -> tuple[PreparedRun, Subject, Pace]:
    """Warm the engines up, and choose the grid unless it was named."""
    stages.begin("timing", "warming up")
    pace = measure_pace(prepared, subject, ceilings, budget)
    if not prepared.ladder:
        return prepared, subject, pace
    grid, larger = choose_grid(prepared, pace, budget)
    return replace(prepared.on(grid), larger=larger), on_grid(subject, grid, stages), pace


def bytes_without_weights(module: nn.Module, request: ModelRequest, grid: Grid) -> int:
    """Return what the cell that needs least memory and the drift probe need besides the weights of a model on meta."""
    work, cell = walk(module), min(grid.cells, key=lambda cell: cell.batch_size * cell.slots)
    path = path_here(module, work, request.device, request.dtype, cell.depth)
    need = memory_need(work, 0, Step(cell.batch_size, cell.prefilled, 0), cell.slots - cell.prefilled, path)
    return int(need.safe_bytes) + PROBE_BYTES


def dispatch_of_twin(
    prepared: PreparedRun,
    subject: Subject,
    stages: Stages,
    budget: RunBudget,
    batch_sizes: Sequence[int],
    engines: Sequence[str],
    fresh: bool = True,
) -> list[DispatchSamples]:
    """Return the dispatch time of each engine's steps at these batch sizes, measured within this run's budget.

    Unless `fresh`, that of the last day is used where four steps agree with it. Sizes at which no cell fits into memory
    are left out.
    """
    stages.begin("dispatch", "measuring dispatch on the hollow twin")
    guard, budget_s = partial(stages.optional, *_DISPATCH), budget.part_s(RunPart.OVERHEAD)
    with guard():
        sizes = subject.fitting(batch_sizes)  # the twin needs memory, too
        return measure_dispatch(
            subject.loaded, prepared.config, subject.machine, sizes, engines, budget_s, guard, fresh=fresh
        )
    return []


def measure_ceilings(
    request: ModelRequest, machine: Machine, work: ModelWork, budget_s: float, *, fresh: bool, busy: bool = False
) -> Ceilings:
    """Return the device's roofs for the dtypes of a model's products, cached for a day unless `fresh`.

    A roof that could not be measured is replaced by the datasheet's peak. On a busy machine, which reaches no roof,
    cached roofs are not checked, and measured ones are not cached.
    """
    dtypes, model_dtype = roof_dtypes(work, request, machine.info), dtype_name(request.dtype)
    checks = effort.STANDARD.checks_kept_roofs and not busy
    measuring = partial(measure, machine, dtypes, model_dtype=model_dtype, budget_s=budget_s, checks_known=checks)
    ceilings = cached(measuring, machine, fresh=fresh, keeps=not busy)
    return ceilings.only(dtypes, model_dtype, machine.info.datasheet)


def roof_dtypes(work: ModelWork, request: ModelRequest, device: Device) -> list[str]:
    """Return the dtypes of this model's products, float32, and the 16-bit dtype that the device multiplies."""
    used = {dtype_name(operator.dtype) for operator in work.operators if operator.dtype.itemsize > 0}
    return sorted({"float32", device.sixteen_bit_dtype, dtype_name(request.dtype), *used})


def make_engines(prepared: PreparedRun, loaded: LoadedModel, work: ModelWork, machine: Machine) -> dict[str, Engine]:
    """Return the engines by name, in the order of the grid. Raises RequestError if one refuses the model."""
    names = prepared.grid.engines
    engines: dict[str, Engine] = {name: ENGINES[name](loaded.module, machine) for name in names if name in ENGINES}
    if PADDED_ENGINE in engines:
        engines[PADDED_ENGINE] = PaddedEngine(loaded.module, machine, prepared.grid.requests_of)
    for name in (name for name in names if name in OWNING):
        # A sequence takes whole blocks of at most 256 tokens, and one more block stays empty. No window limits them.
        first_bytes = cache_bytes(work, 1, 1)
        token_bytes = cache_bytes(work, 1, 2) - first_bytes
        cells = prepared.grid.cells
        most_bytes = max(cell.batch_size * (first_bytes + (cell.slots + 511) * token_bytes) for cell in cells)
        room_bytes = int(min(most_bytes, 0.8 * machine.available_bytes()))
        engines[name] = OWNING[name](loaded, machine, prepared.grid, room_bytes)
    return {name: engines[name] for name in names}
