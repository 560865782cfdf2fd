"""The main job: count, measure the roofs, time the cells, try changes; then split the times, and report."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from traceback import clear_frames
from typing import Any

from profiler import effort
from profiler.device.contention import ForeignLoad, Neighbours
from profiler.device.machine import machine_for
from profiler.device.process_group import ProcessGroup
from profiler.device.telemetry import Watch, idle_power_w, source_for
from profiler.engines.registry import ENGINES
from profiler.errors import DeviceError, RankError
from profiler.facts.contention import Contention
from profiler.facts.measurements import Readings
from profiler.facts.roofs import swing
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
from profiler.run.neighbours import LOOK, UNSEEN, host_threads, wait_for_neighbours
from profiler.run.options import Options, check_options
from profiler.run.setup import load_subject, measure_foundation, other_bytes, roof_dtypes
from profiler.run.stages import Listener, Stages
from profiler.run.tensor_parallel import Ranks, set_up_ranks
from profiler.run.validate import PreparedRun, prepare
from profiler.run.warnings import OWN_CORES
from profiler.store.document import RunDocument
from profiler.store.folder import Run
from profiler.store.writer import RunStore, write_document
from profiler.units import several

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
    prepared: PreparedRun,
    listener: Listener,
    visits: Sweep = sweep,
    group: ProcessGroup | None = None,
    *,
    spent_s: float = 0.0,
    further_runs: int = 0,
) -> Run:
    """Execute a checked request: count, measure, time, try; then split the times and report, also if it is interrupted.

    `visits` decides the order of visits. `spent_s` of the budget elapsed before; `further_runs` of the same command
    follow. With a `group`, this process is its rank 0, and the other ranks follow it (`tensor_parallel.follow_rank`).
    """
    with RunStore(prepared.out, resume=prepared.resumed) as store, quiet_libraries(), reported_fallbacks() as fallbacks:
        session = set_up(prepared, store, listener, fallbacks, group, spent_s, further_runs)
        stages = session.stages
        ended: KeyboardInterrupt | DeviceError | RankError | None = None
        try:
            time_cells(session, visits)
            explain_cells(session)
            if session.ranks is None:
                try_changes(session)
            else:
                session.ranks.end()
            measure_options(session, store.folder)
        except (DeviceError, RankError) as error:
            ended = error
        except KeyboardInterrupt as interrupt:
            # torchrun ends the other ranks as soon as one is gone, so a lost rank is the reason.
            ended = group.failure() if group is not None and group.lost() else interrupt
        if ended is None or isinstance(ended, KeyboardInterrupt):
            forecast_missing_cells(session)
        document = replace(closing(session.document, session.subject, stages, ended), fallbacks=tuple(fallbacks))
        write_document(store.folder, document)
        del session  # the folder has its content, and judging needs the model's memory
        if ended:
            clear_frames(ended.__traceback__)  # the traceback's frames hold it as well
        run = judge_folder(store.folder, finished=ended is None)
        if isinstance(ended, RankError):
            raise ended  # torchrun waits for this process to end; `roofscope report` can write the report
        run = _report(run, document, stages)
        if ended:
            raise ended
        return run


def set_up(
    prepared: PreparedRun,
    store: RunStore,
    listener: Listener,
    fallbacks: list[Fallback],
    group: ProcessGroup | None,
    spent_s: float,
    further_runs: int,
) -> Session:
    """Load the model, count its steps, measure the roofs, and open the run folder's log; arguments as of `execute`.

    `fallbacks` grows while the libraries work.
    """
    machine = machine_for(prepared.request.device)
    if group is not None:
        prepared = replace(prepared, request=replace(prepared.request, device=group.device))
        machine = machine_for(group.device, source=source_for(group.device, group.helper_pids))
    grid, stages = prepared.grid, Stages(listener, machine)
    absent = {
        RunPart.TRIALS: prepared.options.no_levers,
        RunPart.GENERATE: not any(ENGINES[name].whole_calls for name in grid.engines if name in ENGINES),
        RunPart.QUEUE: grid.ragged is None,
    }
    budget = RunBudget(
        machine,
        prepared.budget_s,
        effort.STANDARD,
        whole=prepared.whole or group is not None,
        spent_s=spent_s,
        without={part for part, is_absent in absent.items() if is_absent},
        further_runs=further_runs,
    )
    idle_w = foreign = neighbours = ranks = None
    contention: list[Contention] = []
    with stages.optional("reading the idle device's power", "its idle power is unknown"):
        idle_w = idle_power_w(machine.source)
    with stages.optional(LOOK, UNSEEN):
        if group is None:
            neighbours = Neighbours()
        else:
            foreign = ForeignLoad(group.helper_pids)
    if group is None:
        if not prepared.whole:
            stages.left_s = lambda: budget.left_s + budget.further_s
        subject = load_subject(prepared, stages, budget)
        if neighbours is not None:
            with stages.optional(LOOK, UNSEEN):
                contention = wait_for_neighbours(neighbours, stages, budget)
        ceilings, dispatch = measure_foundation(prepared, subject, stages, budget, busy=bool(contention))
    else:
        stages.begin("loading", f"loading {prepared.request.source.name} over {group.size} ranks")
        ranks = Ranks(prepared, group, machine)
        stages.begin("roofs", "measuring the roofs of all ranks at once, and the link between them")
        dtypes = roof_dtypes(ranks.work, prepared.request, machine.info)
        subject, ceilings, dispatch = set_up_ranks(prepared, ranks, dtypes)
        if ranks.own_cores:
            prepared = replace(prepared, warnings=(*prepared.warnings, OWN_CORES))
    document = opening(prepared, subject, ceilings, dispatch, stages, idle_power_w=idle_w, foreign=foreign)
    document = replace(document, ranks=group.size if group else 1)
    ledger = open_log(prepared, store, document, subject, [ceilings, *dispatch, *contention])
    return Session(prepared, subject, document, ledger, stages, budget, ranks, neighbours, fallbacks)


def time_cells(session: Session, visits: Sweep) -> None:
    """Time the cells in repeated visits, and watch the device's telemetry, its own speed and other processes."""
    subject, ledger, stages, budget = session.subject, session.ledger, session.stages, session.budget
    grid, machine, whole = session.prepared.grid, subject.machine, session.prepared.whole
    late_s = _LATE_SHARE * budget.total_s if session.ranks is None else math.inf
    plan = Plan(grid, budget.sweep_s, whole, floors_s=floors_s(session), late_s=late_s, effort=effort.STANDARD)
    if whole:
        budget.extend(expected_sweep_s(plan))
        stages.left_s = lambda: budget.left_s + budget.further_s
    stages.begin("timing", f"timing {several(len(grid.cells), 'cell', 'cells')}")
    own_bytes = other_bytes(subject.engines, machine.allocated_bytes() - subject.held_bytes, subject.model_bytes)
    watched = _MachineChecks(session)
    # Cells without a number are tried again: what they lacked, such as memory, may be available now.
    earlier = [visit for visits in ledger.gathered.visits.values() for visit in visits]
    with Watch(machine.source) as watch:
        for name, engine in subject.engines.items():
            cell = replace(grid.cells[0], engine=name)
            warm_up(engine, cell, machine, vocab_size=subject.vocab_size, budget_s=budget.warm_up_s)
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
            vocab_size=subject.vocab_size,
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
                    if contention.disturbs(host_threads(machine.info)):
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
