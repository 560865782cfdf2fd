"""A run over several ranks: rank 0 does the job, and the others follow its orders."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from profiler.counting.operators import ModelWork
from profiler.counting.tensor_parallel import walk_rank
from profiler.data.links import Link
from profiler.device.machine import Machine
from profiler.device.process_group import ProcessGroup, in_common_s, silent
from profiler.engines.base import Engine
from profiler.engines.transformers import EagerEngine, LeadingEngine
from profiler.facts.dispatch import DispatchSamples
from profiler.facts.measurements import RankSteps
from profiler.facts.roofs import Ceilings
from profiler.grid.cells import Cell
from profiler.loading.meta_model import plan, quiet_libraries
from profiler.loading.request import dtype_name
from profiler.loading.tensor_parallel import Share, load_share
from profiler.measure.dispatch import measure_dispatch
from profiler.measure.subject import Subject, execution_paths
from profiler.measure.visit import VisitContext, follow
from profiler.roofs.links import measure_collective
from profiler.roofs.measure import measure
from profiler.run.validate import PreparedRun

"""Seconds for the sweep of all-reduces, as long as a stage of the roofs."""
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
    """One rank's passes over its share of a cell without exchanges: the prefill, or filling the cache, then each step.

    Ranks whose hosts wait for their exchanges meet in each instead.
    """

    prefill_s: float | None
    decode_s: tuple[float, ...]
    begun_s: tuple[float, ...]
    """When this rank reached each exchange, as many in each pass (`Silence`)."""
    ended_s: tuple[float, ...]

    @property
    def timed_s(self) -> NDArray[np.float64]:
        """[pass]; NaN for a prefill that is not timed."""
        return np.array([math.nan if self.prefill_s is None else self.prefill_s, *self.decode_s])


def own_work(engine: Engine, cell: Cell, steps: int, bench: VisitContext, group: ProcessGroup) -> RankTiming:
    """Return the timing of this rank's share of a cell while all ranks work at once."""
    with silent(group, bench.machine) as silence:
        prefill_s, decode_s = follow(engine, cell, steps, bench)
    return RankTiming(prefill_s, decode_s, tuple(silence.begun_s), tuple(silence.ended_s))


def rank_shares(cell: Cell, every: Sequence[RankTiming], *, one_clock: bool = True) -> RankSteps:
    """Return the ranks' shares of a cell: the time of each, and the time until the last rank is done.

    A rank's own share is what it spends outside of exchanges. The time of all is what they do not spend in exchanges
    all at once.
    """
    timed_s = np.array([timing.timed_s for timing in every])  # [rank, pass]
    begun_s, ended_s = (
        np.array(marks_s).reshape(*timed_s.shape, len(marks_s[0]) // timed_s.shape[1])  # [rank, pass, exchange]
        for marks_s in ([timing.begun_s for timing in every], [timing.ended_s for timing in every])
    )
    own_s = timed_s - (ended_s - begun_s).sum(axis=2)
    last_s = timed_s.max(axis=0) - in_common_s(begun_s, ended_s, one_clock=one_clock).sum(axis=1)
    prefills = slice(0, 0) if every[0].prefill_s is None else slice(0, 1)
    return RankSteps(
        cell,
        tuple(map(float, own_s[:, prefills].ravel())),
        tuple(map(float, np.median(own_s[:, 1:], axis=1))),
        prefill_last_s=float(last_s[prefills].sum()),
        decode_last_s=float(np.median(last_s[min(2, len(last_s) - 1) :])),  # the first step pays for the cache's growth
    )


def middle(passes: Sequence[RankSteps]) -> RankSteps:
    """Return the median of several passes over a cell, rank by rank."""
    prefill_s, decode_s = (
        tuple(map(statistics.median, zip(*each, strict=True)))
        for each in ([one.prefill_s for one in passes], [one.decode_s for one in passes])
    )
    return RankSteps(
        passes[0].cell,
        prefill_s,
        decode_s,
        prefill_last_s=statistics.median(one.prefill_last_s for one in passes),
        decode_last_s=statistics.median(one.decode_last_s for one in passes),
    )


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
        self.bench = VisitContext(machine, int(prepared.config.get_text_config().vocab_size))
        self._engine = EagerEngine(self.share.joined, machine)

    def engine(self) -> LeadingEngine:
        """Return the engine that steps the model from rank 0."""

        def announce(cell: Cell, steps: int | None) -> None:
            self.group.order(Order("step", cell, steps))

        return LeadingEngine(self.share.joined, self.machine, self.group, announce)

    def roofs(self, dtypes: Sequence[str]) -> tuple[Ceilings, Link]:
        """Return this device's roofs while all ranks measure theirs, and the link between them (rank 0)."""
        self.group.order(Order("roofs", dtypes=tuple(dtypes)))
        return self._roofs(dtypes)

    def own_steps(self, cells: Sequence[Cell]) -> list[RankSteps]:
        """Return the time of each rank's share of these cells, all at once and without exchanges (rank 0)."""
        steps = []
        for cell in cells:
            self.group.order(Order("alone", cell))
            every = self.group.gather(self._share_timings(cell))
            steps.append(
                middle([rank_shares(cell, each, one_clock=self.group.one_clock) for each in zip(*every, strict=True)])
            )
        return steps

    def follow(self) -> None:
        """Follow the orders of rank 0, until it ends the run or is gone."""
        while (order := self.group.next_order()) is not None and order.kind != "end":
            if order.kind == "roofs":
                self._roofs(order.dtypes)
            elif order.kind == "alone":
                self.group.gather(self._share_timings(order.cell))
            else:
                follow(self._engine, order.cell, order.steps, self.bench)

    def end(self) -> None:
        """Release the other ranks (rank 0)."""
        self.group.order(Order("end"))

    def _roofs(self, dtypes: Sequence[str]) -> tuple[Ceilings, Link]:
        roofs = measure(self.machine, list(dtypes), model_dtype=dtype_name(self.share.alone.request.dtype))
        return roofs, measure_collective(self.group, self.machine)

    def _share_timings(self, cell: Cell) -> list[RankTiming]:
        """This rank's passes over its share of a cell, without the one that warms up."""
        steps = min(_OWN_STEPS, cell.decode_steps)
        timings = [own_work(self._engine, cell, steps, self.bench, self.group) for _ in range(1 + _PASSES)]
        return timings[1:]


def set_up_ranks(
    prepared: PreparedRun, ranks: Ranks, dtypes: Sequence[str]
) -> tuple[Subject, Ceilings, list[DispatchSamples]]:
    """Set up rank 0: the work of its share, roofs measured by all ranks at once, the link, and dispatch."""
    machine, grid, held_bytes = ranks.machine, prepared.grid, ranks.machine.allocated_bytes()
    roofs, link = ranks.roofs(dtypes)
    loaded = ranks.share.alone
    engines = {name: ranks.engine() for name in grid.engines}
    paths = execution_paths(loaded, ranks.work, engines, grid)
    subject = Subject(machine, loaded, ranks.work, engines, paths, grid, held_bytes)
    own = roofs.only(list(dtypes), dtype_name(loaded.request.dtype), machine.info.datasheet)
    ceilings = replace(own, collective=link)
    twin_s = min(0.02 * prepared.budget_s, 1.5)
    dispatch = measure_dispatch(loaded, prepared.config, machine, grid.batch_sizes, grid.engines, twin_s)
    return subject, ceilings, dispatch


def follow_rank(prepared: PreparedRun, group: ProcessGroup, machine: Machine) -> None:
    """Run a rank other than 0 until rank 0 ends the run."""
    with quiet_libraries():
        Ranks(prepared, group, machine).follow()
