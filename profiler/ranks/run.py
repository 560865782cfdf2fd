"""A run over several ranks: rank 0 does the job, and the others follow its orders."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from profiler.counting.tensor_parallel import walk_rank
from profiler.device.clock import no_gc
from profiler.device.machine import Machine, machine_for
from profiler.device.telemetry import idle_power_w, source_for
from profiler.engines.base import DecodeState
from profiler.engines.transformers import EagerEngine
from profiler.facts.roofs import Ceilings
from profiler.facts.visits import Gap, Visit
from profiler.fallbacks import Fallback, reported_fallbacks
from profiler.grid.cells import Cell
from profiler.loading.meta_model import plan, quiet_libraries
from profiler.loading.request import dtype_name
from profiler.measure.dispatch import measure_dispatch
from profiler.measure.rounds import Plan
from profiler.measure.subject import Subject, execution_paths
from profiler.measure.sweep import sweep
from profiler.ranks.process_group import ProcessGroup
from profiler.ranks.share import load_share
from profiler.roofs.measure import measure
from profiler.run.document import opening
from profiler.run.fact_log import open_log
from profiler.run.measure import Session, explain_cells, measure_options
from profiler.run.pipeline import IDLE_POWER, budget_of, keeping_what_was_measured, report, time_cells
from profiler.run.setup import roof_dtypes
from profiler.run.stages import Listener, Stages
from profiler.run.validate import PreparedRun
from profiler.store.folder import Run
from profiler.store.writer import RunStore

OWN_CORES = (
    "each rank runs on its own cores here, and gloo's event loops cannot preempt it: a plain torchrun gives neither,"
    " and its steps take longer."
)
_TWIN_SHARE, _TWIN_MOST_S = 0.02, 1.5
"""The share of the budget, and the seconds at most, for each measurement of dispatch."""


@dataclass(frozen=True)
class Order:
    """What the other ranks do next: a prefill of a cell with decode steps, the roofs and the link, or the end."""

    kind: Literal["step", "roofs", "end"]
    cell: Cell | None = None
    steps: int | None = None
    dtypes: tuple[str, ...] = ()


class LeadingEngine(EagerEngine):
    """Runs rank 0's share. A failed step ends the run, since the other ranks wait for the rest of it."""

    def __init__(self, model: Any, machine: Machine, group: ProcessGroup) -> None:
        super().__init__(model, machine)
        self._group = group
        self.helper_pids = group.helper_pids

    def announce(self, cell: Cell, steps: int | None) -> None:
        self._group.order(Order("step", cell, steps))

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        with self._group.together():
            return super().prefill(ids_BS, slots)

    def decode(self, state: DecodeState) -> DecodeState:
        with self._group.together():
            return super().decode(state)


class Ranks:
    """One rank's side of a run: its share of the model, and its work in step with the other ranks."""

    def __init__(self, prepared: PreparedRun, group: ProcessGroup, machine: Machine) -> None:
        request = replace(prepared.request, device=group.device)
        skeleton: Any = plan(replace(request, weights="random"), copy.deepcopy(prepared.config))
        self.group = group
        self.machine = machine
        self.prompts = prepared.prompts
        self.work = walk_rank(skeleton, group.size, group.rank)
        self.joined, self.alone = load_share(request, prepared.config, group, skeleton)
        self.own_cores = group.share_cores()

    def roofs(self, dtypes: Sequence[str]) -> Ceilings:
        """Return this device's roofs while all ranks measure theirs, with the link between them."""
        if self.group.rank == 0:
            self.group.order(Order("roofs", dtypes=tuple(dtypes)))
        dtype = dtype_name(self.alone.request.dtype)
        roofs = measure(self.machine, list(dtypes), model_dtype=dtype)
        link = self.group.measure_link(self.machine)
        return replace(roofs.only(list(dtypes), dtype, self.machine.info.datasheet), collective=link)

    def follow(self) -> None:
        """Follow the orders of rank 0, until it ends the run or is gone."""
        engine = EagerEngine(self.joined, self.machine)
        while (order := self.group.next_order()) is not None and order.kind != "end":
            if order.kind == "roofs":
                self.roofs(order.dtypes)
                continue
            cell = order.cell
            with torch.inference_mode(), no_gc():
                if cell.prompt_len:
                    state = engine.prefill(self.prompts.of(cell).to(self.machine.device), cell.slots)
                else:
                    state = engine.fill(cell.batch_size, cell.context_len, cell.slots)
                for _ in range(order.steps or 0):
                    state = engine.decode(state)


def execute_ranks(prepared: PreparedRun, listener: Listener, group: ProcessGroup, *, spent_s: float = 0.0) -> Run:
    """Execute a checked request as rank 0 of `group`, whose other ranks follow it (`follow_rank`).

    No visit is given up, since the others would wait for the rest of it, and no change is tried. Raises RankError if
    another rank ends or fails; what was measured is kept.
    """
    with RunStore(prepared.out, resume=prepared.resumed) as store, quiet_libraries(), reported_fallbacks() as fallbacks:
        session = _set_up(prepared, store, listener, fallbacks, group, spent_s)
        with keeping_what_was_measured(session) as ending, _lost_rank_first(group):
            time_cells(session, _patient_sweep)
            explain_cells(session)
            group.order(Order("end"))
            measure_options(session, prepared.out)
        del session
        return report(ending, prepared.out)


@contextlib.contextmanager
def _lost_rank_first(group: ProcessGroup) -> Iterator[None]:
    """Context manager that raises a lost rank in place of the interrupt: torchrun ends the others when one is gone."""
    try:
        yield
    except KeyboardInterrupt:
        if group.lost():
            raise group.failure() from None
        raise


def _patient_sweep(engines: Any, plan: Plan, *, machine: Machine, **named: Any) -> Iterator[Visit | Gap]:
    """A sweep whose visits may take as long as they need. A GPU counts its own energy, not that of all ranks."""
    for found in sweep(engines, replace(plan, late_s=math.inf), machine=machine, **named):
        yield replace(found, energy_j=None) if isinstance(found, Visit) and machine.is_cuda else found


def _set_up(
    prepared: PreparedRun,
    store: RunStore,
    listener: Listener,
    fallbacks: list[Fallback],
    group: ProcessGroup,
    spent_s: float,
) -> Session:
    """Set up rank 0: the work of its share, roofs measured by all ranks at once, the link, and dispatch."""
    machine = machine_for(group.device, source=source_for(group.device, group.helper_pids))
    prepared = replace(prepared, request=replace(prepared.request, device=group.device))
    budget, grid = budget_of(replace(prepared, whole=True), machine, spent_s), prepared.grid
    stages = Stages(listener, machine, left_s=budget.to_end_s)
    idle_w = stages.tried(*IDLE_POWER, partial(idle_power_w, machine.source))
    stages.begin("loading", f"loading {prepared.request.source.name} over {group.size} ranks")
    ranks = Ranks(prepared, group, machine)
    stages.begin("roofs", "measuring the roofs of all ranks at once, and the link between them")
    held_bytes, loaded, work = machine.allocated_bytes(), ranks.alone, ranks.work
    ceilings = ranks.roofs(roof_dtypes(work, prepared.request, machine.info))
    engines = {name: LeadingEngine(ranks.joined, machine, group) for name in grid.engines}
    paths = execution_paths(loaded, work, engines, grid, prepared.prompts)
    subject = Subject(machine, loaded, work, engines, paths, grid, prepared.prompts, held_bytes)
    twin_s = min(_TWIN_SHARE * prepared.budget_s, _TWIN_MOST_S)
    dispatch = measure_dispatch(loaded, prepared.config, machine, grid.batch_sizes, grid.engines, twin_s)
    if ranks.own_cores:
        prepared = replace(prepared, warnings=(*prepared.warnings, OWN_CORES))
    document = opening(prepared, subject, ceilings, dispatch, stages, idle_power_w=idle_w)
    document = replace(document, ranks=group.size)
    ledger = open_log(prepared, store, document, subject, [ceilings, *dispatch])
    return Session(prepared, subject, document, ledger, stages, budget, fallbacks=fallbacks, forecasts=False)


def follow_rank(prepared: PreparedRun, group: ProcessGroup) -> None:
    """Run a rank other than 0 until rank 0 ends the run."""
    with quiet_libraries():
        Ranks(prepared, group, machine_for(group.device)).follow()
