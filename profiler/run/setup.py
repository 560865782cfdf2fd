"""Load the model, measure what all cells depend on (ceilings, overhead, links), and choose the grid."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial

import torch
from pydantic import TypeAdapter
from torch import nn

from profiler import effort
from profiler.counting.chosen_kernel import path_here
from profiler.counting.memory_need import cache_bytes, memory_need
from profiler.counting.model_numbers import compute_bound_from_batch, floor_under
from profiler.counting.operators import ModelWork
from profiler.counting.walk import walk
from profiler.device.contention import Neighbours
from profiler.device.device import Device
from profiler.device.machine import Machine
from profiler.engines.base import Engine
from profiler.engines.registry import ENGINES, OWNING
from profiler.engines.transformers import PaddedEngine
from profiler.errors import ModelError, RoofscopeError, describe_error, first_line
from profiler.facts.ceilings import Ceilings, swing
from profiler.facts.overhead import OverheadSamples
from profiler.facts.step import ExecutionPath, Step
from profiler.facts.telemetry import Contention
from profiler.grid.cells import PHASES, CellKey, Grid
from profiler.grid.ragged import PADDED_ENGINE
from profiler.loading.load import load
from profiler.loading.request import LoadedModel, ModelRequest, dtype_name
from profiler.measure.overhead import kept_in, measure_overhead
from profiler.measure.schedule import Plan, Schedule
from profiler.measure.subject import Subject, execution_paths
from profiler.measure.sweep import WarmUp, warm_up
from profiler.quant.bitsandbytes import four_bit_rule_error
from profiler.quant.registry import FORMATS
from profiler.roofs.bandwidth import measure_links, measure_weights
from profiler.roofs.measure import PROBE_BYTES, DriftProbe, cached, measure
from profiler.roofs.sampler import attempt
from profiler.run.fact_log import FactLog
from profiler.run.stages import Guard, RunBudget, RunPart, Stages
from profiler.run.validate import PreparedRun
from profiler.store.document import LargerGrid
from profiler.user_cache import read_recent, write_cache

LOOK, UNSEEN = "the check for other processes", "busy processes are not detected"
"""Name of this part and the effect of its failure, for `Stages.optional`."""
_LOOK_S = 0.5
"""Seconds between two looks at other processes."""
_CHECK_EVERY_S = 2.0
"""Time between checks of the machine, each of which takes a quarter of a second on a CPU."""
_WEIGHT_READ_SHARE = 0.08
"""Share of the time of the ceilings for reading the model's own weights."""
_DRIFT = "the probe of the machine's speed", "a change in the machine's own speed is not detected"
_OVERHEAD = "the CPU overhead", "the host's share of a step is unexplained"
_USUAL_ATTAINED = 0.55
"""The median share of the roofline that steps attain in the reference runs."""
_MARGIN = 1.3
"""Repetitions take longer than expected by at most this factor: other work comes between them, and a machine varies."""
_NEIGHBOUR = 2.5
"""A change of pace by less than this factor may be a busy process: two threads then share a core, and all wait."""
_WIDER = 4
"""Sequences of the second warm-up, which shows how times grow with the batch."""
_PAST_COMPUTE_BOUND = 4
"""A batch test continues for two doublings past the batch from which compute limits, so that the slope shows."""
_LEAST_TESTED = 8
_BUDGET_STEP_S = 10.0


def load_subject(prepared: PreparedRun, stages: Stages) -> Subject:
    """Load the model, make its engines, and count its work. Raises ModelError for whatever reason it does not load."""
    request, machine = prepared.request, stages.machine
    before_bytes = machine.allocated_bytes()  # of this process's other models, as in a notebook
    stages.begin("loading", f"loading {request.source.name} ({dtype_name(request.dtype)}, {request.weights} weights)")
    try:
        rest_bytes = partial(bytes_without_weights, request=request, grid=prepared.smallest)
        loaded = load(request, prepared.config, rest_bytes)
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
    """Wait, for a share of the budget, until no other process keeps needed cores busy. Returns what still does."""
    most_s = budget.effort.neighbours_share * budget.total_s
    threads, looks_left, others = stages.machine.info.host_threads, int(most_s / _LOOK_S), neighbours.look()
    if looks_left and others.disturbs(threads):
        busy = f"{others.busy_cores} busy with {others.who}"
        stages.begin("waiting", f"{busy}: waiting at most {most_s:.0f} s for that to end")
    while looks_left and others.disturbs(threads):
        time.sleep(_LOOK_S)
        others, looks_left = neighbours.look(), looks_left - 1
    return [others] if others.disturbs(threads) else []


class MachineChecks:
    """Looks at the machine's own speed and at other processes between repetitions, at most every `_CHECK_EVERY_S`."""

    def __init__(self, machine: Machine, ledger: FactLog, stages: Stages, neighbours: Neighbours | None) -> None:
        self._machine, self._ledger, self._stages, self._neighbours = machine, ledger, stages, neighbours
        self._checked_s = -math.inf
        self._probe = stages.tried(*_DRIFT, partial(DriftProbe, machine))  # there may be no memory for its buffers

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
        return swing(self._ledger.gathered.drift_readings, on_gpu=self._machine.is_cuda)


def measure_device(
    prepared: PreparedRun, subject: Subject, stages: Stages, budget: RunBudget, *, busy: bool
) -> Ceilings:
    """Measure the ceilings of the model's matmuls, or take those of the last day, and the links to offloaded weights.

    A ceiling that could not be measured is replaced by the datasheet's peak. `busy` says that other processes disturb:
    ceilings are then neither checked, nor kept, nor measured on the model's weights.
    """
    machine, loaded, budget_s = subject.machine, subject.loaded, budget.part_s(RunPart.CEILINGS)
    stages.begin("roofs", "measuring this device's ceilings")
    dtypes = ceiling_dtypes(subject.work, subject.request, machine.info)
    model_dtype, ceilings_s = dtype_name(subject.request.dtype), (1 - _WEIGHT_READ_SHARE) * budget_s
    checks = effort.STANDARD.checks_kept_ceilings and not busy
    measuring = partial(measure, machine, dtypes, model_dtype=model_dtype, budget_s=ceilings_s, checks_known=checks)
    ceilings = cached(measuring, machine, fresh=prepared.options.fresh, keeps=not busy)
    ceilings = ceilings.only(dtypes, model_dtype, machine.info.datasheet)
    links, missing = measure_links(sorted(loaded.offloaded_bytes), machine)
    weights = None
    if not busy:
        with attempt("the model's own weights", machine, missing):
            weights = measure_weights(loaded.module.parameters(), machine, _WEIGHT_READ_SHARE * budget_s)
    ceilings = replace(ceilings, links=links, weights=weights, missing={**ceilings.missing, **missing})
    for name, why in ceilings.missing.items():
        stages.miss(f"measuring {name}", why, "this ceiling is missing")
    return ceilings


WarmUps = Mapping[str, tuple[WarmUp, ...]]
"""By engine: of one sequence, and of more of them if there was time."""
_WARM_UPS = TypeAdapter(dict[str, tuple[WarmUp, ...]])


@dataclass(frozen=True)
class Pace:
    """How fast this machine runs the smallest cells, and the least time of others."""

    subject: Subject
    ceilings: Ceilings
    warm_ups: WarmUps

    def plan(self, grid: Grid) -> Plan:
        """Return a plan of this grid with the seconds that each of its cells is expected to take."""
        all_warm_ups = [item for of_engine in self.warm_ups.values() for item in of_engine]
        is_cuda = self.subject.machine.is_cuda
        return Plan(
            grid,
            0.0,
            expected_s={key: self.expected_s(key) for key in grid.keys},
            first_use=max((item.first_use for item in all_warm_ups), default=1.0) if is_cuda else 0.0,
            new_shape_s={name: items[-1].new_shape_s for name, items in self.warm_ups.items() if items},
        )

    def expected_s(self, key: CellKey) -> float:
        """Return the seconds of a prefill or step that continue the warm-ups' times.

        On a GPU small cells take the host's time, whatever they compute: it is then at least the roofline's time at the
        share of it that is usually attained. So it is where one warm-up shows no slope.
        """
        warm_ups = self.warm_ups[key.cell.engine]
        times = [(item.cell, item.prefill_s if key.phase == "prefill" else item.decode_s) for item in warm_ups]
        points = [(CellKey(key.phase, cell).tokens, seconds) for cell, seconds in times if seconds is not None]
        continued_s = 0.0
        if points:
            (first, first_s), (last, last_s) = points[0], points[-1]
            slope_s = max(0.0, (last_s - first_s) / (last - first)) if last > first else 0.0
            continued_s = first_s + slope_s * max(0, key.tokens - first)
        if not self.ceilings.judges or (len(points) > 1 and not self.subject.machine.is_cuda):
            return continued_s
        work, dtype = self.subject.work, dtype_name(self.subject.request.dtype)
        ceilings = self.ceilings.ceiling_set(self.subject.machine.device.type)
        return max(continued_s, float(floor_under(work, Step.of(key), ceilings, dtype).floor_s) / _USUAL_ATTAINED)


def measure_pace(prepared: PreparedRun, subject: Subject, ceilings: Ceilings, budget: RunBudget) -> Pace:
    """Warm up each engine with the smallest cell; if a grid is to be chosen, also with more sequences of it."""
    smallest = prepared.smallest.cells[0]
    warm_ups: dict[str, tuple[WarmUp, ...]] = {}
    machine = subject.machine
    for name, engine in subject.engines.items():
        of_engine: list[WarmUp] = []
        start_s = machine.now_s()
        for batch_size in (smallest.batch_size, _WIDER) if prepared.ladder else (smallest.batch_size,):
            cell = replace(smallest, engine=name, batch_size=batch_size)
            is_late = machine.now_s() - start_s > 2 * budget.warm_up_s  # such as after compiling
            if of_engine and (is_late or subject.lack_of_memory(cell)):
                break
            if found := warm_up(engine, cell, machine, prompts=subject.prompts, budget_s=budget.warm_up_s):
                of_engine.append(found)
        warm_ups[name] = tuple(of_engine)
    return Pace(subject, ceilings, warm_ups)


def steady_pace(prepared: PreparedRun, pace: Pace) -> Pace:
    """Return the last day's pace of this model here, for the same grid; the new one if steps differ, or if `fresh`."""
    settings = *prepared.grid.engines, *astuple(prepared.smallest.cells[0])
    path = kept_in("pace", pace.subject.loaded, prepared.config, pace.subject.machine, *settings)
    kept: WarmUps = {} if prepared.options.fresh else read_recent(path, _WARM_UPS.validate_json) or {}
    before_s, now_s = ({name: items[0].decode_s for name, items in of.items() if items} for of in (kept, pace.warm_ups))
    same = before_s.keys() == now_s.keys()
    if kept and same and all(1 / _NEIGHBOUR < now_s[name] / before_s[name] < _NEIGHBOUR for name in now_s):
        return replace(pace, warm_ups=kept)
    write_cache(path, _WARM_UPS.dump_json(dict(pace.warm_ups)))
    return pace


def choose_grid(prepared: PreparedRun, pace: Pace, budget: RunBudget) -> tuple[Grid, LargerGrid | None]:
    """Return the largest grid of the ladder that fits into memory and, twice, into the budget; and the next larger one.

    The smallest one is taken in any case.
    """
    ladder, sweep_s = _useful(prepared, pace), budget.part_s(RunPart.TIMING)
    safely = prepared.doubled is None  # a batch test looks for the memory's end
    larger: LargerGrid | None = None
    for grid in ladder[:-1]:
        budget_s = None
        if all(pace.subject.lack_of_memory(cell, safely=safely) is None for cell in reversed(grid.cells)):
            needs_s = _MARGIN * Schedule(pace.plan(grid)).whole_grid_s
            if needs_s <= sweep_s:
                return grid, larger
            budget_s = _BUDGET_STEP_S * math.ceil(needs_s / effort.STANDARD.shares["timing"] / _BUDGET_STEP_S)
        larger = LargerGrid(grid.prompt_lens, grid.batch_sizes, budget_s)
    return ladder[-1], larger


def _useful(prepared: PreparedRun, pace: Pace) -> list[Grid]:
    """The ladder without batch tests that double far past the batch from which compute limits."""
    if prepared.doubled is None or not pace.ceilings.judges:
        return list(prepared.ladder)
    subject, dtype = pace.subject, dtype_name(prepared.request.dtype)
    step = Step.of(CellKey(prepared.doubled, prepared.grid.cells[0]))
    knee = compute_bound_from_batch(subject.work, step, pace.ceilings.ceiling_set(subject.machine.device.type), dtype)
    most = math.inf if knee is None else max(_LEAST_TESTED, _PAST_COMPUTE_BOUND * knee)
    return [grid for grid in prepared.ladder if grid.batch_sizes[-1] <= most]


def set_grid(
    prepared: PreparedRun, subject: Subject, ceilings: Ceilings, stages: Stages, budget: RunBudget
) -> tuple[PreparedRun, Subject, Pace]:
    """Warm the engines up, and choose the grid unless it was named."""
    stages.begin("timing", "warming up")
    pace = measure_pace(prepared, subject, ceilings, budget)
    if not prepared.ladder:
        return prepared, subject, pace
    pace = steady_pace(prepared, pace)
    grid, larger = choose_grid(prepared, pace, budget)
    return replace(prepared.on(grid), larger=larger), on_grid(subject, grid, stages), pace


def bytes_without_weights(module: nn.Module, request: ModelRequest, grid: Grid) -> int:
    """Return what the cell that needs least memory and the drift probe need besides the weights of a model on meta."""
    work, cell = walk(module), min(grid.cells, key=lambda cell: cell.batch_size * cell.slots)
    path = path_here(module, work, request.device, request.dtype, cell.depth)
    need = memory_need(work, 0, Step(cell.batch_size, cell.prefilled, 0), cell.slots - cell.prefilled, path)
    return int(need.safe_bytes) + PROBE_BYTES


def overhead_of_model(
    prepared: PreparedRun,
    subject: Subject,
    stages: Stages,
    budget: RunBudget,
    batch_sizes: Sequence[int],
    engines: Sequence[str],
    fresh: bool = True,
    guard: Guard | None = None,
) -> list[OverheadSamples]:
    """Return the overhead of each engine's steps at these batch sizes, measured within this run's budget.

    Unless `fresh`, that of the last day is used if four steps agree with it. Sizes at which no cell fits are left out.
    `guard` suppresses errors; without one, the run reports them as a part that is missing.
    """
    stages.begin("dispatch", "measuring the CPU overhead")
    guard, budget_s = guard or partial(stages.optional, *_OVERHEAD), budget.part_s(RunPart.OVERHEAD)
    with guard():
        sizes = subject.fitting(batch_sizes)  # the overhead model needs memory, too
        return measure_overhead(
            subject.loaded, prepared.config, subject.machine, sizes, engines, budget_s, guard, fresh=fresh
        )
    return []


def ceiling_dtypes(work: ModelWork, request: ModelRequest, device: Device) -> list[str]:
    """Return the dtypes of this model's matmuls, float32, and BF16 or FP16, as the device multiplies it."""
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
