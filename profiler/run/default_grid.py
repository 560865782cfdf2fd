"""Choose the grid of a run when its model is loaded: the largest of its ladder that the budget measures twice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from profiler.counting.model_numbers import compute_bound_from_batch, floor_under
from profiler.effort import STANDARD
from profiler.facts.roofs import Ceilings
from profiler.facts.step import Step
from profiler.grid.cells import CellKey, Grid
from profiler.loading.request import dtype_name
from profiler.measure.schedule import Plan, Schedule
from profiler.measure.subject import Subject
from profiler.measure.sweep import WarmUp, warm_up
from profiler.run.stages import RunBudget, RunPart
from profiler.run.validate import PreparedRun
from profiler.store.document import LargerGrid

_USUAL_ATTAINED = 0.55
"""The median share of the roofline that steps attain in the reference runs."""
_MARGIN = 1.3
"""Visits take longer than expected by at most this factor: other work comes between them, and a machine varies."""
_WIDER = 4
"""Sequences of the second warm-up, which shows how times grow with the batch."""
_PAST_COMPUTE_BOUND = 4
"""A batch test continues for two doublings past the batch from which compute limits, so that the slope shows."""
_LEAST_TESTED = 8
_BUDGET_STEP_S = 10


@dataclass(frozen=True)
class Pace:
    """How fast this machine runs the smallest cells, and the least time of others."""

    subject: Subject
    ceilings: Ceilings
    warm_ups: Mapping[str, tuple[WarmUp, ...]]
    """By engine: one sequence, and more of them if there was time."""
    _known_s: dict[CellKey, float] = field(init=False, default_factory=dict)

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
        if key not in self._known_s:
            self._known_s[key] = self._expect(key)
        return self._known_s[key]

    def _expect(self, key: CellKey) -> float:
        times = [(CellKey(key.phase, item.cell).tokens, item.of(key.phase)) for item in self.warm_ups[key.cell.engine]]
        points = [(tokens, seconds) for tokens, seconds in times if seconds is not None]
        continued_s = 0.0
        if points:
            (first, first_s), (last, last_s) = points[0], points[-1]
            slope_s = max(0.0, (last_s - first_s) / (last - first)) if last > first else 0.0
            continued_s = first_s + slope_s * max(0, key.tokens - first)
        if not self.ceilings.judges or (len(points) > 1 and not self.subject.machine.is_cuda):
            return continued_s
        work, dtype = self.subject.work, dtype_name(self.subject.request.dtype)
        roofs = self.ceilings.roof_set(self.subject.machine.device.type)
        return max(continued_s, floor_under(work, Step.of(key), roofs, dtype).total_s / _USUAL_ATTAINED)


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
            if of_engine and (is_late or subject.no_room(cell)):
                break
            if found := warm_up(engine, cell, machine, prompts=subject.prompts, budget_s=budget.warm_up_s):
                of_engine.append(found)
        warm_ups[name] = tuple(of_engine)
    return Pace(subject, ceilings, warm_ups)


def choose_grid(prepared: PreparedRun, pace: Pace, budget: RunBudget) -> tuple[Grid, LargerGrid | None]:
    """Return the largest grid of the ladder that fits into memory and, twice, into the budget; and the next larger one.

    The smallest one is taken in any case.
    """
    ladder, sweep_s = _useful(prepared, pace), budget.part_s(RunPart.TIMING)
    safely = prepared.doubled is None  # a batch test looks for the memory's end
    larger: LargerGrid | None = None
    for grid in ladder[:-1]:
        needs_s = None
        if all(pace.subject.no_room(cell, safely=safely) is None for cell in reversed(grid.cells)):
            needs_s = _MARGIN * Schedule(pace.plan(grid)).whole_grid_s
            if needs_s <= sweep_s:
                return grid, larger
        larger = LargerGrid(grid.prompt_lens, grid.batch_sizes, _budget_of(needs_s))
    return ladder[-1], larger


def _budget_of(sweep_s: float | None) -> float | None:
    """The budget whose visits take `sweep_s`, rounded up."""
    if sweep_s is None:
        return None
    return float(_BUDGET_STEP_S * math.ceil(sweep_s / STANDARD.shares["timing"] / _BUDGET_STEP_S))


def _useful(prepared: PreparedRun, pace: Pace) -> list[Grid]:
    """The ladder without batch tests that double far past the batch from which compute limits."""
    if prepared.doubled is None or not pace.ceilings.judges:
        return list(prepared.ladder)
    subject, dtype = pace.subject, dtype_name(prepared.request.dtype)
    step = Step.of(CellKey(prepared.doubled, prepared.grid.cells[0]))
    knee = compute_bound_from_batch(subject.work, step, pace.ceilings.roof_set(subject.machine.device.type), dtype)
    most = math.inf if knee is None else max(_LEAST_TESTED, _PAST_COMPUTE_BOUND * knee)
    return [grid for grid in prepared.ladder if grid.batch_sizes[-1] <= most]
