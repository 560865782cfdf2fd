"""The main job: count, measure the roofs, time the cells, try changes; then split the times, and report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from traceback import clear_frames
from typing import Any

from profiler import effort
from profiler.device.contention import Neighbours
from profiler.device.machine import Machine, machine_for
from profiler.device.telemetry import Watch, idle_power_w
from profiler.engines.registry import ENGINES
from profiler.errors import DeviceError
from profiler.facts.measurements import Readings
from profiler.facts.visits import Gap, Visit
from profiler.fallbacks import Fallback, reported_fallbacks
from profiler.grid.cells import PHASES, Cell, CellKey
from profiler.loading.meta_model import quiet_libraries
from profiler.measure.rounds import Plan, Progress, corners, expected_sweep_s
from profiler.measure.sweep import sweep
from profiler.report.progress import QuietListener
from profiler.run.document import closing, opening
from profiler.run.fact_log import open_log
from profiler.run.judge_folder import judge_folder
from profiler.run.measure import (
    Session,
    Sweep,
    compare_with_dense,
    explain_cells,
    measure_options,
    search_unexplained,
    skip_the_rest,
    try_changes,
)
from profiler.run.options import Options, check_options
from profiler.run.setup import (
    LOOK,
    UNSEEN,
    MachineChecks,
    dispatch_of_twin,
    load_subject,
    measure_device,
    set_grid,
    wait_for_neighbours,
)
from profiler.run.stages import Listener, RunBudget, RunPart, Stages
from profiler.run.validate import PreparedRun, prepare
from profiler.store.document import RunDocument
from profiler.store.folder import Run
from profiler.store.writer import RunStore, write_document
from profiler.units import several

IDLE_POWER = "reading the idle device's power", "its idle power is unknown"
_TABLE = "the table of cells during the sweep", "it is written at the end of the run"
_LATE_SHARE = 0.1
"""A visit may exceed the budget by this share before it is given up."""


def profile(model: str | None = None, *, listener: Listener | None = None, **options: Any) -> Run:
    """Profile a causal LM and write a run folder; the same job as `roofscope run`.

    `model` is a hub id, a folder, a GGUF file or a preset's name (None: the default model). `options` are the fields of
    `profiler.run.options.Options`. `prompt_lens`, `batch_sizes` and `context_lens` are numbers or texts in the range
    grammar; `engine` is one name, or several with commas. `budget_s` is the time from the loaded model to the
    answer (None: 60, but a grid that is named is measured whole). `out` is the folder (default: a new one under
    `runs/`).

    Raises RequestError for a request that cannot be met, before anything is loaded.
    """
    check_options(list(options))
    return execute(prepare(Options(model=model, **options)), listener or QuietListener())


def execute(
    prepared: PreparedRun, listener: Listener, visits: Sweep = sweep, *, spent_s: float = 0.0, further_runs: int = 0
) -> Run:
    """Execute a checked request: count, measure, time, try; then split the times and report, also if it is interrupted.

    `visits` decides the order of visits. The command took `spent_s` before; `further_runs` of it follow.
    """
    with RunStore(prepared.out, resume=prepared.resumed) as store, quiet_libraries(), reported_fallbacks() as fallbacks:
        session = set_up(prepared, store, listener, fallbacks, spent_s, further_runs)  # 1. count, 2. measure
        with keeping_what_was_measured(session) as ending:
            time_cells(session, visits)  # 3. time, and try changes once the corners are timed
            explain_cells(session)  # 4. split: what the terms of a time need
            try_changes(session, session.budget.rest_s)  # 5. try what there is time left for
            compare_with_dense(session)
            search_unexplained(session)
            measure_options(session, prepared.out)
        del session  # judging needs the memory of its model
        return report(ending, prepared.out)


@dataclass
class Ending:
    """How the measuring of a run ended."""

    document: RunDocument
    stages: Stages
    error: KeyboardInterrupt | DeviceError | None = None


@contextmanager
def keeping_what_was_measured(session: Session) -> Iterator[Ending]:
    """Context manager of the measuring, which Ctrl-C or a lost device ends; what was measured is in run.json then."""
    ending = Ending(session.document, session.stages)
    try:
        yield ending
    except (DeviceError, KeyboardInterrupt) as error:
        ending.error = error
    if ending.error is None:
        skip_the_rest(session)
    document = closing(session.document, session.subject, session.stages, ending.error)
    ending.document = replace(document, fallbacks=tuple(session.fallbacks))
    write_document(session.prepared.out, ending.document)


def report(ending: Ending, folder: Path) -> Run:
    """Judge what was measured and write the reports, then raise what ended the measuring."""
    error, document = ending.error, ending.document
    if error:
        clear_frames(error.__traceback__)  # they hold the session, whose model's memory judging needs
    run = judge_folder(folder, finished=error is None)
    if not isinstance(error, DeviceError) or error.time_to_report:
        run = _write_reports(run, document, ending.stages)
    if error:
        raise error
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
    idle_w = stages.tried(*IDLE_POWER, partial(idle_power_w, machine.source))
    neighbours = stages.tried(LOOK, UNSEEN, Neighbours)
    subject = load_subject(prepared, stages)
    budget = budget_of(prepared, machine, further_runs)
    stages.left_s = budget.to_end_s
    contention = neighbours and stages.tried(LOOK, UNSEEN, partial(wait_for_neighbours, neighbours, stages, budget))
    ceilings = measure_device(prepared, subject, stages, budget, busy=bool(contention))
    prepared, subject, pace = set_grid(prepared, subject, ceilings, stages, budget)
    sizes, engines, fresh = prepared.grid.batch_sizes, prepared.grid.engines, prepared.options.fresh
    dispatch = dispatch_of_twin(prepared, subject, stages, budget, sizes, engines, fresh=fresh)
    document = opening(prepared, subject, ceilings, dispatch, stages, idle_power_w=idle_w)
    for warning in document.set_up_warnings:
        listener.stage(f"! {warning}")
    ledger = open_log(prepared, store, document, subject, [ceilings, *dispatch, *(contention or ())])
    return Session(prepared, subject, document, ledger, stages, budget, pace, neighbours, fallbacks)


def grid_of(prepared: PreparedRun, listener: Listener) -> PreparedRun:
    """Return the run on the default grid that it would choose. The model is loaded for that, and released."""
    machine = machine_for(prepared.request.device)
    stages = Stages(listener, machine)
    with quiet_libraries():
        subject = load_subject(prepared, stages)
        budget = budget_of(prepared, machine)
        ceilings = measure_device(prepared, subject, stages, budget, busy=False)
        chosen, _, _ = set_grid(prepared, subject, ceilings, stages, budget)
    return chosen


def budget_of(prepared: PreparedRun, machine: Machine, further_runs: int = 0) -> RunBudget:
    """Return the budget of a run, without the parts that it does not have; it begins now."""
    grid = prepared.grid
    absent = {
        RunPart.TRIALS: prepared.options.no_levers,
        RunPart.GENERATE: not any(ENGINES[name].whole_calls for name in grid.engines if name in ENGINES),
    }
    return RunBudget(
        machine,
        prepared.budget_s,
        effort.STANDARD,
        whole=prepared.whole,
        without={part for part, is_absent in absent.items() if is_absent},
        further_runs=further_runs,
    )


def time_cells(session: Session, visits: Sweep) -> None:
    """Time the cells in repeated visits; once each corner of the grid has one, try changes in their share."""
    budget, grid, whole = session.budget, session.prepared.grid, session.prepared.whole
    plan = replace(
        session.pace.plan(grid),
        whole=whole,
        late_s=_LATE_SHARE * budget.total_s,
        tail_s=effort.STANDARD.tail_share * budget.total_s,
        effort=effort.STANDARD,
        ascending=session.prepared.ascending,
    )
    if whole:
        budget.extend(expected_sweep_s(plan), with_trials=True)
    trials_s, left_s = budget.part_s(RunPart.TRIALS), budget.part_s(RunPart.TIMING)
    if trials_s:
        left_s -= _visit_cells(session, visits, replace(plan, budget_s=left_s), corners(grid.cells))
        try_changes(session, trials_s)
        plan = replace(plan, expected_s=_expected_s(plan, session.ledger.facts.medians_s()))
    _visit_cells(session, visits, replace(plan, budget_s=left_s), ())
    budget.extend(0.0)
    session.stages.tried(*_TABLE, session.ledger.keep_table)


def _expected_s(plan: Plan, measured_s: Mapping[CellKey, float]) -> dict[CellKey, float]:
    """Expected seconds of each prefill and step, from those that were measured."""
    found = dict(plan.expected_s)
    for phase in PHASES:
        keys = [key for key in plan.expected_s if key.phase == phase]
        over = [measured_s[key] / plan.expected_s[key] for key in keys if key in measured_s]
        found |= {key: median(over) * plan.expected_s[key] for key in keys if over}
    return {**found, **measured_s}


def _visit_cells(session: Session, visits: Sweep, plan: Plan, until: Sequence[Cell]) -> float:
    """Visit the cells, until all of `until` have an outcome if there are any; return the seconds that it took.

    The device's telemetry, its own speed and other processes are watched.
    """
    subject, ledger, stages, budget = session.subject, session.ledger, session.stages, session.budget
    machine, gathered, cells = subject.machine, ledger.gathered, session.prepared.grid.cells
    start_s, waiting = machine.now_s(), set(until) - gathered.visits.keys()
    if until and not waiting:
        return 0.0
    stages.begin("timing", f"timing {several(len(cells), 'cell', 'cells')}")
    checks = MachineChecks(machine, ledger, stages, session.neighbours)  # the drift probe's buffers are not a cell's
    owned = [engine.owned for engine in subject.engines.values() if engine.owned]
    own_bytes = machine.allocated_bytes() - subject.held_bytes
    own_bytes += sum(model.weight_bytes + model.cache_bytes for model in owned)
    # Cells without a number are tried again: what they lacked, such as memory, may be available now.
    earlier = [visit for of_cell in gathered.visits.values() for visit in of_cell]
    with Watch(machine.source) as watch:
        after_s = budget.after_sweep_s if plan.whole else budget.left_s - plan.budget_s

        def show(progress: Progress) -> None:
            """Report the times of the whole run instead of those of the sweep."""
            left_s = progress.left_s + after_s + budget.further_s
            of_run = replace(progress, elapsed_s=budget.elapsed_s, left_s=left_s)
            stages.listener.progress(of_run, len(cells))

        for outcome in visits(
            subject.engines,
            plan,
            machine=machine,
            prompts=subject.prompts,
            own_bytes=own_bytes,
            fits=lambda cell: stages.tried(
                "the check for free memory", "cells are tried without it", partial(subject.no_room, cell)
            ),
            on_progress=show,
            before_visits=checks.swing,
            earlier=earlier,
        ):
            # A cell with a number gets one more visit after its first failure, and then no further ones.
            if (
                isinstance(outcome, Gap)
                and outcome.cell in gathered.visits
                and (outcome.cell in gathered.gaps or outcome.status != "failed")
            ):
                stages.miss("later visits of some cells", outcome.reason, "their times are from earlier visits")
            ledger.add(outcome)
            if machine.is_cuda and isinstance(outcome, Visit) and outcome.wall_s < watch.interval_s:
                watch.look(outcome.at_unix_s + outcome.wall_s / 2)
            if readings := watch.taken():
                ledger.add(Readings(readings))
            stages.tried(*_TABLE, partial(ledger.judge, [outcome.cell]))
            waiting.discard(outcome.cell)
            if until and not waiting:
                break
        checks.swing()
    return machine.now_s() - start_s


def _write_reports(run: Run, document: RunDocument, stages: Stages) -> Run:
    """Write the reports. What fails is added to `document`, and the pages are written once more with it."""
    stages.listener.stage("writing the report")
    # Imported late: plotting libraries hold 100 MB, which the roofs' buffers need.
    from profiler.report.write import write_reports

    def guard(name: str) -> AbstractContextManager[None]:
        return stages.optional(name, "the file is left out")

    write_reports([run], guard)
    if len(stages.missing) > len(document.missing):
        write_document(run.folder, replace(document, missing=tuple(stages.missing)))
        run = judge_folder(run.folder, finished=run.document.finished)
        write_reports([run], guard)
    return run
