"""The main job: count, measure the roofs, time the cells, try changes; then split the times, and report."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from traceback import clear_frames
from typing import Any, TypeVar

from profiler import effort
from profiler.device.contention import Neighbours
from profiler.device.machine import Machine, machine_for
from profiler.device.telemetry import Watch, idle_power_w
from profiler.engines.registry import ENGINES
from profiler.errors import DeviceError
from profiler.facts.measurements import Readings
from profiler.facts.roofs import swing
from profiler.facts.telemetry import Contention
from profiler.facts.visits import Gap, Visit
from profiler.fallbacks import Fallback, reported_fallbacks
from profiler.grid.cells import Cell
from profiler.loading.meta_model import quiet_libraries
from profiler.measure.sweep import Plan, Progress, expected_sweep_s, sweep
from profiler.measure.visit import warm_up
from profiler.report.progress import QuietListener
from profiler.roofs.drift_probe import DriftProbe
from profiler.run.budget import RunBudget, RunPart
from profiler.run.document import closing, opening
from profiler.run.fact_log import open_log
from profiler.run.judge_folder import judge_folder
from profiler.run.measure import (
    Session,
    Sweep,
    explain_cells,
    floors_s,
    forecast_missing_cells,
    measure_options,
    try_changes,
)
from profiler.run.options import Options, check_options
from profiler.run.setup import LOOK, UNSEEN, load_subject, measure_foundation, other_bytes, wait_for_neighbours
from profiler.run.stages import Listener, Stages
from profiler.run.validate import PreparedRun, prepare
from profiler.store.document import RunDocument
from profiler.store.folder import Run
from profiler.store.writer import RunStore, write_document
from profiler.units import several

OneSession = TypeVar("OneSession", bound=Session)

_TABLE, _NO_TABLE = "the table of cells during the sweep", "it is written at the end of the run"
_LATE_SHARE = 0.1
"""A visit may exceed the budget by this share before it is given up."""
_CHECK_EVERY_S = 2.0
"""Time between checks of the machine, each of which takes a quarter of a second on a CPU."""


def profile(model: str | None = None, *, listener: Listener | None = None, **options: Any) -> Run:
    """Profile a causal LM and write a run folder; the same job as `roofscope run`.

    `model` is a hub id, a folder, a GGUF file or a preset's name (None: the default model). `options` are the fields of
    `profiler.run.options.Options`. `prompt_lens`, `batch_sizes` and `context_lens` are numbers or texts in the range
    grammar; `engine` is one name, or several with commas. `budget_s` is the time from the start to the answer (None:
    60, but a grid that is named is measured whole). `out` is the folder (default: a new one under `runs/`).

    Raises RequestError for a request that cannot be met, before anything is loaded.
    """
    check_options(list(options))
    return execute(prepare(Options(model=model, **options)), listener or QuietListener())


def execute(
    prepared: PreparedRun, listener: Listener, visits: Sweep = sweep, *, spent_s: float = 0.0, further_runs: int = 0
) -> Run:
    """Execute a checked request: count, measure, time, try; then split the times and report, also if it is interrupted.

    `visits` decides the order of visits. `spent_s` of the budget elapsed before; `further_runs` of the same command
    follow.
    """

    def measured(session: Session) -> None:
        time_cells(session, visits)
        explain_cells(session)
        try_changes(session)
        measure_options(session, prepared.out)

    with RunStore(prepared.out, resume=prepared.resumed) as store, quiet_libraries(), reported_fallbacks() as fallbacks:
        return complete(set_up(prepared, store, listener, fallbacks, spent_s, further_runs), measured)


def complete(session: OneSession, measured: Callable[[OneSession], None]) -> Run:
    """Let `measured` fill the session's log, then judge and report, also if it is interrupted.

    It is given the only reference to the session, whose model's memory judging needs.
    """
    folder, stages = session.prepared.out, session.stages
    ended: KeyboardInterrupt | DeviceError | None = None
    try:
        measured(session)
    except (DeviceError, KeyboardInterrupt) as error:
        ended = error
    if not isinstance(ended, DeviceError):
        forecast_missing_cells(session)
    document = closing(session.document, session.subject, stages, ended)
    document = replace(document, fallbacks=tuple(session.fallbacks))
    write_document(folder, document)
    del session
    if ended:
        clear_frames(ended.__traceback__)  # the traceback's frames hold it as well
    run = judge_folder(folder, finished=ended is None)
    if not isinstance(ended, DeviceError) or ended.time_to_report:
        run = _report(run, document, stages)
    if ended:
        raise ended
    return run


def set_up(
    prepared: PreparedRun,
    store: RunStore,
    listener: Listener,
    fallbacks: list[Fallback],
    spent_s: float,
    further_runs: int,
) -> Session:
    """Load the model, count its steps, measure the roofs, and open the run folder's log; arguments as of `execute`.

    `fallbacks` grows while the libraries work.
    """
    machine = machine_for(prepared.request.device)
    stages = Stages(listener, machine, spent_s)
    budget = budget_of(prepared, machine, spent_s, further_runs)
    neighbours = None
    contention: list[Contention] = []
    idle_w = idle_power(stages)
    with stages.optional(LOOK, UNSEEN):
        neighbours = Neighbours()
    if not prepared.whole:
        stages.left_s = lambda: budget.left_s + budget.further_s
    subject = load_subject(prepared, stages, budget)
    if neighbours is not None:
        with stages.optional(LOOK, UNSEEN):
            contention = wait_for_neighbours(neighbours, stages, budget)
    ceilings, dispatch = measure_foundation(prepared, subject, stages, budget, busy=bool(contention))
    document = opening(prepared, subject, ceilings, dispatch, stages, idle_power_w=idle_w)
    ledger = open_log(prepared, store, document, subject, [ceilings, *dispatch, *contention])
    return Session(prepared, subject, document, ledger, stages, budget, neighbours, fallbacks)


def idle_power(stages: Stages) -> float | None:
    """Return the watts of the idle device; None if they cannot be read."""
    with stages.optional("reading the idle device's power", "its idle power is unknown"):
        return idle_power_w(stages.machine.source)
    return None


def budget_of(prepared: PreparedRun, machine: Machine, spent_s: float, further_runs: int = 0) -> RunBudget:
    """Return the budget of a run, without the parts that it does not have; arguments as of `execute`."""
    grid = prepared.grid
    absent = {
        RunPart.TRIALS: prepared.options.no_levers,
        RunPart.GENERATE: not any(ENGINES[name].whole_calls for name in grid.engines if name in ENGINES),
        RunPart.QUEUE: grid.ragged is None,
    }
    return RunBudget(
        machine,
        prepared.budget_s,
        effort.STANDARD,
        whole=prepared.whole,
        spent_s=spent_s,
        without={part for part, is_absent in absent.items() if is_absent},
        further_runs=further_runs,
    )


def time_cells(session: Session, visits: Sweep) -> None:
    """Time the cells in repeated visits, and watch the device's telemetry, its own speed and other processes."""
    subject, ledger, stages, budget = session.subject, session.ledger, session.stages, session.budget
    grid, machine, whole = session.prepared.grid, subject.machine, session.prepared.whole
    late_s = _LATE_SHARE * budget.total_s
    plan = Plan(
        grid,
        budget.sweep_s,
        whole,
        floors_s=floors_s(session),
        late_s=late_s,
        tail_s=effort.STANDARD.tail_share * budget.total_s,
        effort=effort.STANDARD,
        ascending=session.prepared.ascending,
    )
    if whole:
        budget.extend(expected_sweep_s(plan))
        stages.left_s = lambda: budget.left_s + budget.further_s
    stages.begin("timing", f"timing {several(len(grid.cells), 'cell', 'cells')}")
    watched = _MachineChecks(session)  # the drift probe's buffers are not a cell's
    own_bytes = other_bytes(subject.engines, machine.allocated_bytes() - subject.held_bytes, subject.model_bytes)
    # Cells without a number are tried again: what they lacked, such as memory, may be available now.
    earlier = [visit for visits in ledger.gathered.visits.values() for visit in visits]
    with Watch(machine.source) as watch:
        for name, engine in subject.engines.items():
            cell = replace(grid.cells[0], engine=name)
            warm_up(engine, cell, machine, prompts=subject.prompts, budget_s=budget.warm_up_s)
        sweep_s = budget.sweep_s
        after_s = budget.after_sweep_s if whole else budget.left_s - sweep_s

        def show(progress: Progress) -> None:
            """Report the times of the whole run instead of those of the sweep."""
            left_s = progress.left_s + after_s + budget.further_s
            of_run = replace(progress, elapsed_s=budget.elapsed_s, left_s=left_s)
            stages.listener.progress(of_run, len(grid.cells))

        for outcome in visits(
            subject.engines,
            replace(plan, budget_s=sweep_s),
            machine=machine,
            prompts=subject.prompts,
            own_bytes=own_bytes,
            fits=lambda cell: _no_room(session, cell),
            on_progress=show,
            before_visits=watched.swing,
            earlier=earlier,
        ):
            if isinstance(outcome, Gap):
                _report_lost_visits(session, outcome)
            ledger.add(outcome)
            if machine.is_cuda and isinstance(outcome, Visit) and outcome.wall_s < watch.interval_s:
                watch.look(outcome.at_unix_s + outcome.wall_s / 2)
            if readings := watch.taken():
                ledger.add(Readings(readings))
            with stages.optional(_TABLE, _NO_TABLE):
                ledger.judge([outcome.cell])
        watched.swing()
    budget.extend(0.0)
    stages.left_s = lambda: budget.left_s + budget.further_s  # not of the session, which holds the model
    with stages.optional(_TABLE, _NO_TABLE):
        ledger.keep_table()


class _MachineChecks:
    """Looks at the machine's own speed and at other processes between visits, at most every `_CHECK_EVERY_S`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._checked_s = -math.inf
        self._probe: DriftProbe | None = None
        with self._tolerant_of_the_probe():  # there may be no room for its buffers
            self._probe = DriftProbe(session.subject.machine)

    def _tolerant_of_the_probe(self) -> AbstractContextManager[None]:
        return self._session.stages.optional("the drift probe", "a change in the machine's own speed is not detected")

    def swing(self) -> float:
        """Return how much the machine's own speed has varied so far, as a share."""
        session, machine = self._session, self._session.subject.machine
        if machine.now_s() - self._checked_s > _CHECK_EVERY_S:
            if self._probe is not None:
                with self._tolerant_of_the_probe():
                    session.ledger.add(self._probe.look())
            if session.neighbours is not None:
                with session.stages.optional(LOOK, UNSEEN):
                    contention = session.neighbours.look()
                    if contention.disturbs(machine.info.host_threads):
                        session.ledger.add(contention)
            self._checked_s = machine.now_s()
        return swing(session.ledger.gathered.looks)


def _report_lost_visits(session: Session, gap: Gap) -> None:
    """Record that a cell with a number gets no further visits; after its first failure it gets one more."""
    gathered = session.ledger.gathered
    if gap.cell in gathered.visits and (gap.cell in gathered.gaps or gap.status != "failed"):
        session.stages.miss("later visits of some cells", gap.reason, "their times are from earlier visits")


def _no_room(session: Session, cell: Cell) -> str | None:
    """Why a cell cannot fit into memory; None if it may fit, or if that is unknown."""
    with session.stages.optional("the check for free memory", "cells are tried without it"):
        return session.subject.no_room(cell)
    return None


def _report(run: Run, document: RunDocument, stages: Stages) -> Run:
    """Write the reports. What fails is added to `document`, and the pages are written once more with it."""
    stages.listener.stage("writing the report")
    # Imported late: plotting libraries hold 100 MB, which the roofs' buffers need.
    from profiler.report.write import write_pages, write_reports

    def guard(name: str) -> AbstractContextManager[None]:
        return stages.optional(name, "the file is left out")

    pictures = effort.STANDARD.pictures
    write_reports([run], guard, pictures)
    if len(stages.missing) > len(document.missing):
        write_document(run.folder, replace(document, missing=tuple(stages.missing)))
        run = judge_folder(run.folder, finished=run.document.finished)
        write_pages(run, guard, draw="roofline" in pictures)
    return run
