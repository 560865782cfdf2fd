"""A run over several ranks: rank 0 does the job, and the others do what it announces."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from profiler.diagnosis.facts import DispatchSamples, RankSteps
from profiler.engines.base import Engine
from profiler.engines.ranks import LeadingEngine
from profiler.engines.transformers import EagerEngine
from profiler.grid import Cell
from profiler.job.request import Prepared
from profiler.loading.ranks import Share, load_share
from profiler.loading.request import dtype_name
from profiler.loading.skeleton import plan, quiet_libraries
from profiler.machine.links import Link, fitted
from profiler.machine.machine import Machine
from profiler.machine.ranks import Group, silent
from profiler.probes.dispatch import measure_dispatch
from profiler.probes.subject import Subject, execution_paths
from profiler.roofs.measure import measure
from profiler.roofs.values import Ceilings
from profiler.timing.visit import Bench, follow
from profiler.work.operators import ModelWork
from profiler.work.parallel import walk_rank

_LINK_S = 4.0
"""For the sweep of all-reduces, as long as a stage of the roofs."""
_OWN_STEPS = 12
"""Decode steps of each cell's own share."""


@dataclass(frozen=True)
class Order:
    """What the other ranks are to do next."""

    kind: Literal["step", "alone", "roofs", "end"]
    cell: Cell | None = None
    steps: int | None = None
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Alone:
    """One rank's share of a cell, with nothing exchanged nor waited for."""

    prefill_s: float | None
    decode_s: tuple[float, ...]
    reached_s: tuple[float, ...]
    """When each exchange would have begun: as many in the first pass, which fills the cache, as in each step behind it;
    nothing where that is not known."""


def own_work(engine: Engine, cell: Cell, steps: int, bench: Bench, ranks: int) -> Alone:
    """What this rank's share of a cell takes; all ranks work at once."""
    with silent(ranks, bench.machine) as silence:
        prefill_s, decode_s = follow(engine, cell, steps, bench)
    away_s = sum(silence.away_s) / (1 + len(decode_s))
    # A host that runs ahead of its device tells nothing of when the device was there.
    return Alone(
        None if prefill_s is None else prefill_s - away_s,
        tuple(step_s - away_s for step_s in decode_s),
        () if bench.machine.clock.ahead else tuple(silence.reached_s),
    )


def together(cell: Cell, every: Sequence[Alone]) -> RankSteps:
    """The ranks' shares of a cell beside each other, and what they take where each exchange waits for the last rank."""
    prefill_s = tuple(alone.prefill_s for alone in every if alone.prefill_s is not None)
    decode_s = tuple(statistics.median(alone.decode_s) for alone in every)
    steps = len(every[0].decode_s)
    exchanges, odd = divmod(len(every[0].reached_s), steps + 1)
    if not exchanges or odd:
        return RankSteps(cell, prefill_s, decode_s)
    between_s = np.diff([alone.reached_s for alone in every], axis=1)  # [rank, exchange]
    within_s, later_s = between_s[:, : exchanges - 1], between_s[:, exchanges - 1 :]
    around_s = max(np.subtract(prefill_s, within_s.sum(axis=1))) if prefill_s else 0.0
    last_s = later_s.reshape(len(every), steps, exchanges).max(axis=0).sum(axis=1)  # [step]
    return RankSteps(
        cell,
        prefill_s,
        decode_s,
        prefill_last_s=float(within_s.max(axis=0).sum() + around_s) if prefill_s else 0.0,
        decode_last_s=float(np.median(last_s[min(1, steps - 1) :])),  # the first step pays for the cache's growth
    )


class Ranks:
    """One rank's side of a run: its share of the model, and what it does in step with the others."""

    def __init__(self, prepared: Prepared, group: Group, machine: Machine) -> None:
        request = replace(prepared.request, device=group.device)
        skeleton: Any = plan(replace(request, weights="random"), copy.deepcopy(prepared.config))
        self.group = group
        self.machine = machine
        self.work: ModelWork = walk_rank(skeleton, group.size, group.rank)
        self.share: Share = load_share(request, prepared.config, group, skeleton)
        self.own_cores: bool = group.share_cores()
        self.bench = Bench(machine, int(prepared.config.get_text_config().vocab_size))
        self._engine = EagerEngine(self.share.joined, machine)

    def engine(self) -> LeadingEngine:
        """What steps the model from rank 0."""

        def announce(cell: Cell, steps: int | None) -> None:
            self.group.order(Order("step", cell, steps))

        return LeadingEngine(self.share.joined, self.machine, self.group, announce)

    def roofs(self, dtypes: Sequence[str]) -> tuple[Ceilings, Link]:
        """This device's roofs while all ranks measure theirs, and the link between them (rank 0)."""
        self.group.order(Order("roofs", dtypes=tuple(dtypes)))
        return self._roofs(dtypes)

    def own_steps(self, cells: Sequence[Cell]) -> list[RankSteps]:
        """What each rank's own share of these cells takes, all at once, with nothing exchanged (rank 0)."""
        found = []
        for cell in cells:
            self.group.order(Order("alone", cell))
            found.append(together(cell, self.group.gather(self._alone(cell))))
        return found

    def follow(self) -> None:
        """Do what rank 0 wants, until it wants no more or is gone."""
        while (order := self.group.next_order()) is not None and order.kind != "end":
            if order.kind == "roofs":
                self._roofs(order.dtypes)
            elif order.kind == "alone":
                self.group.gather(self._alone(order.cell))
            else:
                follow(self._engine, order.cell, order.steps, self.bench)

    def end(self) -> None:
        """Let the others go (rank 0)."""
        self.group.order(Order("end"))

    def _roofs(self, dtypes: Sequence[str]) -> tuple[Ceilings, Link]:
        roofs = measure(self.machine, list(dtypes), model_dtype=dtype_name(self.share.alone.request.dtype))
        points = self.group.measure_exchange(self.machine, _LINK_S)
        name = "gloo" if self.group.device.type == "cpu" else "NCCL"
        return roofs, fitted(f"{name}, {self.group.size} ranks", points, "measured in this run")

    def _alone(self, cell: Cell) -> Alone:
        """This rank's share of a cell; the second of two, since shapes warm up."""
        steps = min(_OWN_STEPS, cell.decode_steps)
        own_work(self._engine, cell, steps, self.bench, self.group.size)
        return own_work(self._engine, cell, steps, self.bench, self.group.size)


def set_up_ranks(
    prepared: Prepared, ranks: Ranks, dtypes: Sequence[str]
) -> tuple[Subject, Ceilings, list[DispatchSamples]]:
    """What rank 0 holds its cells against: its own share's work, roofs that all ranks press at once, and the link."""
    machine, grid, held_bytes = ranks.machine, prepared.grid, ranks.machine.allocated_bytes()
    roofs, link = ranks.roofs(dtypes)
    loaded = ranks.share.alone
    engines = {name: ranks.engine() for name in grid.engines}
    paths = execution_paths(loaded, ranks.work, engines, grid)
    subject = Subject(machine, loaded, ranks.work, engines, paths, grid, held_bytes)
    ceilings = replace(roofs.only(list(dtypes), dtype_name(loaded.request.dtype)), collective=link)
    twin_s = min(0.075 * prepared.options.budget_s, 1.5)
    dispatch = measure_dispatch(loaded, prepared.config, machine, grid.batch_sizes, grid.engines, twin_s)
    return subject, ceilings, dispatch


def follow_rank(prepared: Prepared, group: Group, machine: Machine) -> None:
    """All that a rank other than 0 does in a run."""
    with quiet_libraries():
        Ranks(prepared, group, machine).follow()
