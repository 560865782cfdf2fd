"""A run over several ranks: rank 0 does the job, and the others follow its orders."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from profiler.counting.operators import ModelWork
from profiler.counting.tensor_parallel import walk_rank
from profiler.data.links import Link
from profiler.device.contention import ForeignLoad
from profiler.device.machine import Machine, machine_for
from profiler.device.telemetry import idle_power_w, source_for
from profiler.engines.base import DecodeState, Engine
from profiler.engines.transformers import EagerEngine
from profiler.facts.measurements import RankSteps
from profiler.facts.roofs import Ceilings
from profiler.facts.visits import Gap, Visit
from profiler.fallbacks import Fallback, reported_fallbacks
from profiler.grid.cells import Cell
from profiler.loading.meta_model import plan, quiet_libraries
from profiler.loading.request import dtype_name
from profiler.measure.dispatch import measure_dispatch
from profiler.measure.rounds import Plan
from profiler.measure.subject import Subject, execution_paths
from profiler.measure.sweep import VisitContext, follow, sweep
from profiler.ranks.process_group import ProcessGroup, in_common_s, silent
from profiler.ranks.share import Share, load_share
from profiler.roofs.measure import measure
from profiler.run.document import opening
from profiler.run.fact_log import open_log
from profiler.run.measure import Session, explain_cells, measure_options
from profiler.run.pipeline import IDLE_POWER, budget_of, keeping_what_was_measured, report, time_cells
from profiler.run.setup import LOOK, UNSEEN, roof_dtypes
from profiler.run.stages import Listener, Stages
from profiler.run.validate import PreparedRun
from profiler.run.warnings import busy_words
from profiler.store.folder import Run
from profiler.store.writer import RunStore

OWN_CORES = (
    "each rank runs on its own cores here, and gloo's event loops cannot preempt it: a plain torchrun gives neither,"
    " and its steps take longer."
)
_TWIN_SHARE, _TWIN_MOST_S = 0.02, 1.5
"""The share of the budget, and the seconds at most, for each measurement of dispatch."""
_OWN_STEPS = 6
"""Decode steps in each pass over a rank's share of a cell."""
_PASSES = 3
"""Such passes, after one that warms the shapes up."""


@dataclass(frozen=True)
class Order:
    """What the other ranks do next."""

    kind: Literal["step", "alone", "roofs", "end"]
    cell: Cell | None = None
    steps: int | None = None
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankTiming:
    """One rank's pass over its share of a cell without exchanges: the prefill, or filling the cache, then each step.

    Ranks whose hosts wait for their exchanges meet in each instead.
    """

    prefill_s: float | None
    decode_s: tuple[float, ...]
    stays_s: tuple[tuple[float, float], ...]
    """When this rank reached and left each exchange, as many in each step (`silent`)."""

    @property
    def timed_s(self) -> NDArray[np.float64]:
        """[step], the prefill first; NaN for a prefill that is not timed."""
        return np.array([math.nan if self.prefill_s is None else self.prefill_s, *self.decode_s])


def own_work(engine: Engine, cell: Cell, steps: int, bench: VisitContext, group: ProcessGroup) -> RankTiming:
    """Return the timing of this rank's share of a cell while all ranks work at once."""
    with silent(group, bench.machine) as stays_s:
        prefill_s, decode_s = follow(engine, cell, steps, bench)
    return RankTiming(prefill_s, decode_s, tuple(stays_s))


def rank_shares(cell: Cell, every: Sequence[Sequence[RankTiming]], *, one_clock: bool = True) -> RankSteps:
    """Return the ranks' shares of a cell: the time of each, and the time until the last rank is done.

    A rank's own share is what it spends outside of exchanges. The time of all is what they do not spend in exchanges
    all at once. `every` has the passes of each rank, whose medians count.
    """
    timed_s = np.array([[timing.timed_s for timing in passes] for passes in every])  # [rank, pass, step]
    stays_s = np.array([[timing.stays_s for timing in passes] for passes in every])
    begun_s, ended_s = np.moveaxis(stays_s.reshape(*timed_s.shape, -1, 2), -1, 0)  # [rank, pass, step, exchange]
    own_s = timed_s - (ended_s - begun_s).sum(axis=3)
    last_s = timed_s.max(axis=0) - in_common_s(begun_s, ended_s, one_clock=one_clock).sum(axis=2)  # [pass, step]
    prefills = slice(0, 0) if every[0][0].prefill_s is None else slice(0, 1)
    settled = min(2, timed_s.shape[2] - 1)  # the first step pays for the cache's growth
    return RankSteps(
        cell,
        tuple(np.median(own_s[:, :, prefills], axis=1).ravel().tolist()),
        tuple(np.median(np.median(own_s[:, :, 1:], axis=2), axis=1).tolist()),
        prefill_last_s=float(np.median(last_s[:, prefills], axis=0).sum()),
        decode_last_s=float(np.median(np.median(last_s[:, settled:], axis=1))),
    )


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
        self.work: ModelWork = walk_rank(skeleton, group.size, group.rank)
        self.share: Share = load_share(request, prepared.config, group, skeleton)
        self.own_cores: bool = group.share_cores()
        self.bench = VisitContext(machine, prepared.prompts)
        self._engine = EagerEngine(self.share.joined, machine)

    def roofs(self, dtypes: Sequence[str]) -> tuple[Ceilings, Link]:
        """Return this device's roofs while all ranks measure theirs, and the link between them (rank 0)."""
        self.group.order(Order("roofs", dtypes=tuple(dtypes)))
        return self._roofs(dtypes)

    def own_steps(self, cells: Sequence[Cell]) -> Iterator[RankSteps]:
        """Yield the time of each rank's share of each cell, all at once and without exchanges (rank 0)."""
        for cell in cells:
            self.group.order(Order("alone", cell))
            every = self.group.gather(self._share_timings(cell))
            yield rank_shares(cell, every, one_clock=self.group.one_clock)

    def follow(self) -> None:
        """Follow the orders of rank 0, until it ends the run or is gone."""
        while (order := self.group.next_order()) is not None and order.kind != "end":
            if order.kind == "roofs":
                self._roofs(order.dtypes)
            elif order.kind == "alone":
                self.group.gather(self._share_timings(order.cell))
            else:
                follow(self._engine, order.cell, order.steps, self.bench)

    def _roofs(self, dtypes: Sequence[str]) -> tuple[Ceilings, Link]:
        roofs = measure(self.machine, list(dtypes), model_dtype=dtype_name(self.share.alone.request.dtype))
        return roofs, self.group.measure_link(self.machine)

    def _share_timings(self, cell: Cell) -> list[RankTiming]:
        """This rank's passes over its share of a cell, without the one that warms up."""
        steps = min(_OWN_STEPS, cell.decode_steps)
        timings = [own_work(self._engine, cell, steps, self.bench, self.group) for _ in range(1 + _PASSES)]
        return timings[1:]


@dataclass(frozen=True, kw_only=True)
class RankSession(Session):
    """The session of rank 0."""

    ranks: Ranks


def execute_ranks(prepared: PreparedRun, listener: Listener, group: ProcessGroup, *, spent_s: float = 0.0) -> Run:
    """Execute a checked request as rank 0 of `group`, whose other ranks follow it (`follow_rank`).

    No visit is given up, since the others would wait for the rest of it, and no change is tried. Raises RankError if
    another rank ends or fails; what was measured is kept.
    """
    with RunStore(prepared.out, resume=prepared.resumed) as store, quiet_libraries(), reported_fallbacks() as fallbacks:
        session = _set_up(prepared, store, listener, fallbacks, group, spent_s)
        with keeping_what_was_measured(session) as ending, _lost_rank_first(group):
            time_cells(session, _patient_sweep)
            session.stages.begin("ranks", "timing each rank's own share")
            visited = session.ledger.gathered.visits
            session.ledger.extend(session.ranks.own_steps([cell for cell in prepared.grid.cells if cell in visited]))
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
) -> RankSession:
    """Set up rank 0: the work of its share, roofs measured by all ranks at once, the link, and dispatch."""
    machine = machine_for(group.device, source=source_for(group.device, group.helper_pids))
    prepared = replace(prepared, request=replace(prepared.request, device=group.device))
    budget, grid = budget_of(replace(prepared, whole=True), machine, spent_s), prepared.grid
    stages = Stages(listener, machine, left_s=budget.to_end_s)
    idle_w = stages.tried(*IDLE_POWER, partial(idle_power_w, machine.source))
    foreign = stages.tried(LOOK, UNSEEN, partial(ForeignLoad, group.helper_pids))
    stages.begin("loading", f"loading {prepared.request.source.name} over {group.size} ranks")
    ranks = Ranks(prepared, group, machine)
    stages.begin("roofs", "measuring the roofs of all ranks at once, and the link between them")
    held_bytes, loaded = machine.allocated_bytes(), ranks.share.alone
    dtypes = roof_dtypes(ranks.work, prepared.request, machine.info)
    roofs, link = ranks.roofs(dtypes)
    engines = {name: LeadingEngine(ranks.share.joined, machine, group) for name in grid.engines}
    paths = execution_paths(loaded, ranks.work, engines, grid, prepared.prompts)
    subject = Subject(machine, loaded, ranks.work, engines, paths, grid, prepared.prompts, held_bytes)
    own = roofs.only(list(dtypes), dtype_name(loaded.request.dtype), machine.info.datasheet)
    ceilings = replace(own, collective=link)
    twin_s = min(_TWIN_SHARE * prepared.budget_s, _TWIN_MOST_S)
    dispatch = measure_dispatch(loaded, prepared.config, machine, grid.batch_sizes, grid.engines, twin_s)
    warnings = [*prepared.warnings, *([OWN_CORES] if ranks.own_cores else [])]
    with stages.optional(LOOK, UNSEEN):
        warnings += busy_words(machine.info.host_threads, foreign) if foreign else []
    prepared = replace(prepared, warnings=tuple(warnings))
    document = opening(prepared, subject, ceilings, dispatch, stages, idle_power_w=idle_w)
    document = replace(document, ranks=group.size)
    ledger = open_log(prepared, store, document, subject, [ceilings, *dispatch])
    return RankSession(
        prepared, subject, document, ledger, stages, budget, fallbacks=fallbacks, forecasts=False, ranks=ranks
    )


def follow_rank(prepared: PreparedRun, group: ProcessGroup) -> None:
    """Run a rank other than 0 until rank 0 ends the run."""
    with quiet_libraries():
        Ranks(prepared, group, machine_for(group.device)).follow()
