"""The main job: count, measure the ceilings, time the cells, try changes; then break the times down, and report."""

import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import Any

from profiler import effort
from profiler.device.contention import Neighbours
from profiler.device.machine import Machine, machine_for
from profiler.device.telemetry import Watch, idle_power_w
from profiler.engines.registry import ENGINES
from profiler.errors import DeviceError, RankError, RequestError, near_misses
from profiler.facts.measurements import Readings
from profiler.facts.repetitions import Gap, Repetition
from profiler.fallbacks import Fallback, reported_fallbacks
from profiler.grid.cells import Cell
from profiler.judge.device_health import DeviceHealth, DeviceRun, healths
from profiler.loading.meta_model import quiet_libraries
from profiler.measure.schedule import Progress, Schedule, corners
from profiler.measure.sweep import RepetitionContext, Sweep, sweep
from profiler.report.progress import Listener
from profiler.run.fact_log import open_log, opening
from profiler.run.judge_folder import judge_folder
from profiler.run.measure import (
    Session,
    compare_formats,
    explain_cells,
    measure_options,
    search_unexplained,
    skip_the_rest,
    try_changes,
)
from profiler.run.options import Options
from profiler.run.setup import (
    LOOK,
    UNSEEN,
    MachineChecks,
    load_subject,
    measure_device,
    overhead_of_model,
    set_grid,
    wait_for_neighbours,
)
from profiler.run.stages import RunBudget, RunPart, Stages
from profiler.run.validate import PreparedRun, prepare
from profiler.store.document import RunDocument
from profiler.store.folder import Run, RunStore, write_document
from profiler.units import several

IDLE_POWER = "reading the idle device's power", "its idle power is unknown"
_ROOM = "the check for free memory", "cells are tried without it"
_TABLE = "the table of cells during the sweep", "it is written at the end of the run"
_LATE_SHARE = 0.1
"""A repetition may exceed the budget by this share before it is given up."""


def profile(model: str | None = None, *, listener: Listener | None = None, **options: Any) -> Run:
    """Profile a causal LM and write a run folder; the same job as `roofscope run`.

    `model` is a hub id, a folder, a GGUF file or a preset's name (None: the default model). `options` are the fields of
    `profiler.run.options.Options`. `prompt_lens`, `batch_sizes` and `context_lens` are numbers or texts in the range
    grammar; `engine` is one name, or several with commas. `budget_s` is the time from the loaded model to the answer
    (None: 60, but a grid that is named is measured whole). `out` is the folder (default: a new one in `runs/`).

    Raises RequestError for a request that cannot be met, before anything is loaded.
    """
    known = [item.name for item in fields(Options)]
    for name in options:
        if name not in known:
            raise RequestError(f"profile() has no option {name!r}.{near_misses(name, known)}")
    return execute(prepare(Options(model=model, **options)), listener or Listener())


def execute(prepared: PreparedRun, listener: Listener, *, spent_s: float = 0.0, further_runs: int = 0) -> Run:
    """Execute a checked request: count, measure, time, try; then break times down and report, also if interrupted.

    The command took `spent_s` before; `further_runs` of it follow.
    """
    with RunStore(prepared.out, resume=prepared.resumed) as store, quiet_libraries(), reported_fallbacks() as fallbacks:
        session = set_up(prepared, store, listener, fallbacks, spent_s, further_runs)  # 1. count, 2. measure
        with keeping_what_was_measured(session) as ending:
            time_cells(session, sweep)  # 3. time, and try changes once the corners are timed
            explain_cells(session)  # 4. break down: what the terms of a time need
            try_changes(session, session.budget.rest_s)  # 5. try what there is time left for
            compare_formats(session)
            search_unexplained(session)
            measure_options(session)
        del session  # judging needs the memory of its model
        return report(ending, prepared.out)


@dataclass
class Ending:
    """How the measuring of a run ended."""

    stages: Stages
    error: KeyboardInterrupt | DeviceError | None = None


@contextmanager
def keeping_what_was_measured(session: Session) -> Iterator[Ending]:
    """Context manager of the measuring, which Ctrl-C or a lost device ends; what was measured is in run.json then."""
    ending = Ending(session.stages)
    try:
        yield ending
    except (DeviceError, KeyboardInterrupt) as error:
        ending.error = error
    unreached = skip_the_rest(session) if ending.error is None else ()
    write_document(session.prepared.out, closing(session, ending.error, unreached))


def closing(session: Session, ended: BaseException | None, unreached: tuple[Cell, ...]) -> RunDocument:
    """Return run.json with what is known only at the end; `ended` ended the measuring before its time."""
    document, stages = session.ledger.document, session.stages
    engines, source = session.subject.engines, session.subject.machine.source
    breaks = {name: engine.graph_breaks for name, engine in engines.items() if engine.graph_breaks is not None}
    skips = {name: engine.graph_skips for name, engine in engines.items() if engine.graph_skips is not None}
    for why in dict.fromkeys(source.failures.values()):
        names = ", ".join(name for name, reason in source.failures.items() if reason == why)
        stages.miss("telemetry", why, f"{names} cannot be read")
    return replace(
        document,
        grid=replace(document.grid, unreached=unreached),
        engine=replace(document.engine, graph_breaks=breaks, graph_skips=skips),
        health=replace(document.health, not_seen=source.missing),
        missing=tuple(stages.missing),
        fallbacks=tuple(session.fallbacks),
        stage_s={name: round(seconds, 3) for name, seconds in stages.spent_s().items()},
        ended_by=str(ended or ""),
    )


def report(ending: Ending, folder: Path) -> Run:
    """Judge what was measured and write the report, then raise what ended the measuring."""
    error = ending.error
    if error:
        clear_frames(error.__traceback__)  # they hold the session, whose model's memory judging needs
    run = judge_folder(folder, finished=error is None)
    if not isinstance(error, RankError):  # torchrun waits for this process to end
        run = _write_report(run, ending.stages)
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
    """Load the model, count, measure the ceilings, and open the log; arguments as of `execute`. `fallbacks` grows."""
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
    overhead = overhead_of_model(prepared, subject, stages, budget, sizes, engines, fresh=fresh)
    document = opening(prepared, subject, ceilings, overhead, stages, idle_power_w=idle_w)
    ledger = open_log(prepared, store, document, subject, [ceilings, *overhead, *(contention or ())])
    return Session(prepared, subject, ledger, stages, budget, pace, neighbours, fallbacks)


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
    engines = [ENGINES[name] for name in prepared.grid.engines if name in ENGINES]
    without = {RunPart.TRIALS} if prepared.options.no_trials else set()
    if not any(engine.whole_calls for engine in engines):
        without.add(RunPart.GENERATE)
    return RunBudget(machine, prepared.budget_s, effort.STANDARD, prepared.whole, without, further_runs)


def time_cells(session: Session, sweep: Sweep) -> None:
    """Time the cells while the machine is watched, and try changes once each corner of the grid has a repetition."""
    subject, ledger, stages, budget = session.subject, session.ledger, session.stages, session.budget
    grid, machine, whole = session.prepared.grid, subject.machine, session.prepared.whole
    plan = replace(
        session.pace.plan(grid),
        whole=whole,
        late_s=_LATE_SHARE * budget.total_s,
        tail_s=effort.STANDARD.tail_share * budget.total_s,
        effort=effort.STANDARD,
        ascending=session.prepared.doubled is not None,
    )
    if whole:
        budget.extend(Schedule(plan).whole_grid_s, with_trials=True)
    trials_s = budget.part_s(RunPart.TRIALS)
    stages.begin("timing", f"timing {several(len(grid.cells), 'cell', 'cells')}")
    checks = MachineChecks(machine, ledger, stages, session.neighbours)  # the drift probe's buffers are not a cell's
    engines = tuple(subject.engines.values())
    owned = [engine.owned for engine in engines if engine.owned]
    # Engines hold the caches of shapes that were warmed up.
    own_bytes = machine.allocated_bytes() - subject.held_bytes - sum(engine.held_bytes for engine in engines)
    own_bytes += sum(model.weight_bytes + model.cache_bytes for model in owned)
    with Watch(machine.source) as watch:
        sweep_s = budget.part_s(RunPart.TIMING)
        after_s = budget.after_sweep_s if whole else budget.left_s - trials_s - sweep_s

        def show(progress: Progress) -> None:
            """Report the times of the whole run instead of those of the sweep."""
            left_s = progress.left_s + after_s + budget.further_s
            of_run = replace(progress, elapsed_s=budget.elapsed_s, left_s=left_s)
            stages.listener.progress(of_run, len(grid.cells))

        schedule = Schedule(
            replace(plan, budget_s=sweep_s),
            machine.now_s,
            look=checks.swing,
            fits=lambda cell: stages.tried(*_ROOM, partial(subject.lack_of_memory, cell)),
            # Cells without a number are tried again: what they lacked, such as memory, may be available now.
            earlier=itertools.chain.from_iterable(ledger.gathered.repetitions.values()),
        )
        waiting = set(corners(grid.cells))
        context = RepetitionContext(machine, subject.prompts, own_bytes, engines)
        for outcome in sweep(schedule, subject.engines, context, show):
            _log(session, outcome, watch)
            if waiting and not (waiting := waiting - ledger.gathered.repetitions.keys() - ledger.gathered.gaps.keys()):
                start_s = machine.now_s()
                try_changes(session, trials_s)
                schedule.pause(machine.now_s() - start_s)
                stages.begin("timing", "timing the other cells")
        checks.swing()
    budget.extend(0.0)
    stages.tried(*_TABLE, ledger.keep_table)


def _log(session: Session, outcome: Repetition | Gap, watch: Watch) -> None:
    ledger, stages, gathered = session.ledger, session.stages, session.ledger.gathered
    # A cell with a number gets one more repetition after its first failure, and then no further ones.
    is_last = outcome.cell in gathered.gaps or (isinstance(outcome, Gap) and outcome.status != "failed")
    if isinstance(outcome, Gap) and outcome.cell in gathered.repetitions and is_last:
        stages.miss("later repetitions of some cells", outcome.reason, "their times are from earlier repetitions")
    ledger.add(outcome)
    if session.subject.machine.is_cuda and isinstance(outcome, Repetition) and outcome.wall_s < watch.interval_s:
        watch.look(outcome.at_unix_s + outcome.wall_s / 2)
    if readings := watch.taken():
        ledger.add(Readings(readings))
    stages.tried(*_TABLE, partial(ledger.judge, [outcome.cell]))


def _write_report(run: Run, stages: Stages) -> Run:
    """Write the report. If that fails, run.json names it, and the run is judged once more with it."""
    stages.listener.stage("writing the report")
    # Imported late: plotting libraries hold 100 MB, which the ceilings' buffers need.
    from profiler.report.html import write_report

    with stages.optional("report.html", "the file is left out"):
        write_report(run)
        return run
    write_document(run.folder, replace(run.document, missing=tuple(stages.missing), finished=False))
    return judge_folder(run.folder, finished=run.document.finished)


def run_precisions(options: Options, precisions: Sequence[str], listener: Listener) -> list[Run]:
    """Profile the model in each precision, and write a report that compares them; the rest is as in `run_devices`."""
    runs = _run_each([replace(options, quant=name) for name in precisions], precisions, "--quant", listener)
    from profiler.run.screens import write_comparison

    write_comparison(runs)
    return runs


def run_devices(options: Options, devices: Sequence[str], listener: Listener) -> list[Run]:
    """Profile the model on each device, in a folder each. Raises RequestError, if at all, before the first run."""
    # Measured fresh: cached ceilings may be those of another card of the same kind.
    each = [replace(options, device=name, fresh=True) for name in devices]
    return _run_each(each, devices, "--device", listener)


def _run_each(options: Sequence[Options], names: Sequence[str], flag: str, listener: Listener) -> list[Run]:
    """A run for each value of an option, each with the budget, on one grid, in a common folder."""
    if len(set(names)) < len(names):
        raise RequestError(f"{flag} {','.join(names)} names one of them twice.")
    prepared = [prepare(one) for one in options]
    base = Path(options[0].out or prepared[0].out)
    prepared = [replace(one, out=base / name.replace(":", "")) for one, name in zip(prepared, names, strict=True)]
    if prepared[0].ladder:
        prepared = _on_one_grid(prepared, listener)
    runs = []
    for number, one in enumerate(prepared, start=1):
        runs.append(execute(one, listener, further_runs=len(prepared) - number))
        gc.collect()  # the model of the last run
    return runs


def _on_one_grid(prepared: Sequence[PreparedRun], listener: Listener) -> list[PreparedRun]:
    """The runs on the default grid of the slowest: each model is loaded and warmed up for that."""
    chosen = []
    for one in prepared:
        chosen.append(grid_of(one, listener))
        gc.collect()  # the model that was warmed up
    slowest = max(chosen, key=lambda found: prepared[0].ladder.index(found.grid))
    return [replace(one.on(slowest.grid), ladder=(), larger=slowest.larger) for one in prepared]


def device_healths(runs: Sequence[Run], devices: Sequence[str]) -> tuple[DeviceHealth, ...]:
    """Return the health of each device of `run_devices`, compared with the others."""
    named = zip(devices, runs, strict=True)
    return healths(
        [DeviceRun(name, run.model.dtype, run.measured, run.document.ceilings.ceilings) for name, run in named]
    )
