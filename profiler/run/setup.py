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
from profiler.counting.attention_kernel import path_here
from profiler.counting.memory_need import cache_bytes, memory_need
from profiler.counting.operators import ModelWork
from profiler.counting.walk import walk
from profiler.device.contention import Neighbours
from profiler.device.device import Device, software
from profiler.device.machine import Machine
from profiler.engines.base import Engine
from profiler.engines.registry import ENGINES, OWNING
from profiler.engines.transformers import PaddedEngine
from profiler.errors import ModelError, RoofscopeError, describe_error, first_line
from profiler.facts.dispatch import DispatchSamples
from profiler.facts.roofs import Ceilings, swing
from profiler.facts.step import ExecutionPath, Step
from profiler.facts.telemetry import Contention
from profiler.grid.cells import PHASES, Grid, Phase
from profiler.grid.ragged import PADDED_ENGINE
from profiler.loading.load import load
from profiler.loading.request import LoadedModel, ModelRequest, dtype_name
from profiler.measure.dispatch import measure_dispatch
from profiler.measure.subject import Subject, execution_paths
from profiler.quant.bitsandbytes import four_bit_rule_error
from profiler.quant.registry import FORMATS
from profiler.roofs.bandwidth import measure_links, measure_weights
from profiler.roofs.fixed_work import PROBE_BYTES, DriftProbe, measure_host_pace
from profiler.roofs.measure import cached, measure
from profiler.roofs.sampler import attempt
from profiler.run.fact_log import FactLog
from profiler.run.stages import RunBudget, Stages
from profiler.run.validate import PreparedRun

LOOK, UNSEEN = "the check for other processes", "busy processes are not detected"
"""Name of this part and the effect of its failure, for `Stages.optional`."""
_LOOK_S = 0.5
"""Seconds between two looks at other processes."""
_CHECK_EVERY_S = 2.0
"""Time between checks of the machine, each of which takes a quarter of a second on a CPU."""
_DRIFT = "the drift probe", "a change in the machine's own speed is not detected"
_DISPATCH = "dispatch on the hollow twin", "the host's share of a step is unexplained"


def load_subject(prepared: PreparedRun, stages: Stages, budget: RunBudget) -> Subject:
    """Load the model, make its engines, and count the work of its steps, by the kernels that this device chooses.

    Raises ModelError for a model that does not load, whatever the reason.
    """
    request, machine = prepared.request, stages.machine
    before_bytes = machine.allocated_bytes()  # of this process's other models, as in a notebook
    with budget.apart():
        stages.begin(
            "loading", f"loading {request.source.name} ({dtype_name(request.dtype)}, {request.weights} weights)"
        )
        try:
            loaded = load(
                request, prepared.config, lambda module: bytes_without_weights(module, request, prepared.grid)
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
    paths: dict[tuple[str, Phase], ExecutionPath] = {
        (name, phase): ExecutionPath() for name in engines for phase in PHASES
    }
    with stages.optional("the choice of kernels", "work is counted as if the fastest ran"):
        paths = execution_paths(loaded, work, engines, prepared.grid, prepared.prompts)
    if FORMATS[request.quant].has_options and (why := four_bit_rule_error(machine.device)):
        stages.miss("bitsandbytes' choice of 4-bit kernels", why, "dense copies are counted from 5 rows on")
    return Subject(machine, loaded, work, engines, paths, prepared.grid, prepared.prompts, held_bytes)


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


def measure_foundation(
    prepared: PreparedRun, subject: Subject, stages: Stages, budget: RunBudget, *, busy: bool
) -> tuple[Ceilings, list[DispatchSamples]]:
    """Measure what all cells depend on: the roofs, the links to offloaded weights, and dispatch.

    `busy` says that other processes disturb: roofs are then neither checked nor measured on the model's weights.
    """
    machine, loaded = subject.machine, subject.loaded
    stages.begin("roofs", "measuring this device's roofs")
    ceilings = measure_ceilings(
        subject.request, machine, subject.work, fresh=prepared.options.fresh, budget=budget, busy=busy
    )
    links, missing = measure_links(sorted(loaded.offloaded_bytes), machine)
    weights = None
    if not busy:
        with attempt("the model's own weights", machine, missing):
            weights = measure_weights(loaded.module.parameters(), machine, budget.weight_read_s)
    ceilings = replace(ceilings, links=links, weights=weights, missing={**ceilings.missing, **missing})
    for name, why in ceilings.missing.items():
        stages.miss(f"measuring {name}", why, "this roof is missing")
    stages.begin("dispatch", "measuring dispatch on the hollow twin")
    grid = prepared.grid
    return ceilings, dispatch_of_twin(prepared, subject, stages, budget, grid.batch_sizes, grid.engines)


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
) -> list[DispatchSamples]:
    """Return the dispatch time of each engine's steps at these batch sizes, measured within this run's budget.

    Sizes at which no cell fits into memory are left out.
    """
    twin_s, machine = budget.dispatch_s(len(PHASES) * len(batch_sizes) * len(engines)), subject.machine
    guard = partial(stages.optional, *_DISPATCH)
    with guard():
        sizes = subject.fitting(batch_sizes)  # the twin needs memory, too
        return measure_dispatch(subject.loaded, prepared.config, machine, sizes, engines, twin_s, guard)
    return []


def measure_ceilings(
    request: ModelRequest,
    machine: Machine,
    work: ModelWork,
    *,
    fresh: bool,
    budget: RunBudget | None = None,
    busy: bool = False,
) -> Ceilings:
    """Return the device's roofs for the dtypes of a model's products, cached for a day unless `fresh`.

    A roof that could not be measured is replaced by the datasheet's peak. On a busy machine, which reaches no roof,
    cached roofs are not checked.
    """
    dtypes, model_dtype = roof_dtypes(work, request, machine.info), dtype_name(request.dtype)
    limits = effort.STANDARD if budget is None else budget

    def measure_missing(known: Ceilings | None) -> Ceilings:
        roofs = measure(
            machine,
            dtypes,
            model_dtype=model_dtype,
            stage_budget_s=limits.roof_s,
            known=known,
            checks_known=effort.STANDARD.checks_kept_roofs and not busy,
        )
        missing, host = dict(roofs.missing), roofs.host
        with attempt("the host's pace", machine, missing):
            host = host or measure_host_pace(machine, limits.host_pace_s)
        return replace(roofs, host=host, missing=missing)

    ceilings = cached(measure_missing, machine, software(), fresh=fresh)
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
