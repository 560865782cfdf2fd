"""The main job: validate, set up, measure, judge, report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from traceback import clear_frames
from typing import Any

from profiler.device.clock import instrument_s
from profiler.device.contention import ForeignLoad, Neighbours
from profiler.device.machine import machine_for
from profiler.device.process_group import ProcessGroup
from profiler.device.telemetry import idle_power_w, source_for
from profiler.engines.registry import ENGINES
from profiler.errors import DeviceError, RankError, RunError
from profiler.facts.contention import Contention
from profiler.facts.fact import Fact, MergedFacts
from profiler.facts.measurements import CellPeak, PredictedPeaks
from profiler.fallbacks import Fallback, reported_fallbacks
from profiler.judge.cells import CellResult
from profiler.loading.meta_model import quiet_libraries
from profiler.measure.subject import Subject
from profiler.measure.sweep import sweep
from profiler.report.progress import QuietListener
from profiler.run.budget import RunBudget, RunPart
from profiler.run.document import config_of, opening
from profiler.run.fact_log import FactLog
from profiler.run.judge_folder import judge_folder
from profiler.run.measure import Session, Sweep, forecast_missing_cells, measure_cells, measure_options
from profiler.run.neighbours import LOOK, UNSEEN, wait_for_neighbours
from profiler.run.options import Options, check_options
from profiler.run.setup import roof_dtypes, set_up
from profiler.run.stages import Listener, Stages
from profiler.run.tensor_parallel import Ranks, set_up_ranks
from profiler.run.validate import PreparedRun, prepare
from profiler.run.warnings import OWN_CORES, device_warnings, model_warnings
from profiler.store.document import HealthRecord, RunDocument
from profiler.store.folder import Run, read_document, read_gathered, read_results, refuse_another
from profiler.store.writer import RunStore, write_config, write_document, write_operators


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
    """Execute a checked request: load, measure the roofs, sweep, judge, write. `visits` decides the order of visits.

    `spent_s` of the budget elapsed before; `further_runs` of the same command follow. With a `group`, this process is
    its rank 0, and the other ranks follow it (`tensor_parallel.follow_rank`).
    """
    with RunStore(prepared.out, resume=prepared.resumed) as store, quiet_libraries(), reported_fallbacks() as fallbacks:
        machine = machine_for(prepared.request.device)
        if group is not None:
            prepared = replace(prepared, request=replace(prepared.request, device=group.device))
            machine = machine_for(group.device, source=source_for(group.device, group.helper_pids))
        budget = RunBudget(
            machine,
            prepared.budget_s,
            prepared.effort,
            whole=prepared.whole or group is not None,
            spent_s=spent_s,
            without=_parts_left_out(prepared),
            further_runs=further_runs,
        )
        return _execute(prepared, store, Stages(listener, machine), budget, visits, group, fallbacks)


def _parts_left_out(prepared: PreparedRun) -> set[RunPart]:
    """Parts of the budget that this request does not use."""
    grid = prepared.grid
    absent = {
        RunPart.TRIALS: prepared.options.no_levers,
        RunPart.GENERATE: not any(ENGINES[name].whole_calls for name in grid.engines if name in ENGINES),
        RunPart.QUEUE: grid.ragged is None,
    }
    return {part for part, is_absent in absent.items() if is_absent}


def _execute(
    prepared: PreparedRun,
    store: RunStore,
    stages: Stages,
    budget: RunBudget,
    visits: Sweep,
    group: ProcessGroup | None,
    fallbacks: list[Fallback],
) -> Run:
    """`fallbacks` grows while the libraries work."""
    idle_w = foreign = neighbours = ranks = None
    contention: list[Contention] = []

    def is_busy() -> bool:
        if neighbours is not None:
            with stages.optional(LOOK, UNSEEN):
                contention.extend(wait_for_neighbours(neighbours, stages, budget))
        return bool(contention)

    with stages.optional("reading the idle device's power", "its idle power is unknown"):
        idle_w = idle_power_w(stages.machine.source)
    with stages.optional(LOOK, UNSEEN):
        if group is None:
            neighbours = Neighbours()
        else:
            foreign = ForeignLoad(group.helper_pids)
    if group is None:
        if not prepared.whole:
            stages.left_s = lambda: budget.left_s + budget.further_s
        subject, ceilings, dispatch = set_up(prepared, stages, budget, is_busy)
    else:
        stages.begin("loading", f"loading {prepared.request.source.name} over {group.size} ranks")
        ranks = Ranks(prepared, group, stages.machine)
        stages.begin("roofs", "measuring the roofs of all ranks at once, and the link between them")
        dtypes = roof_dtypes(ranks.work, prepared.request, stages.machine.info)
        subject, ceilings, dispatch = set_up_ranks(prepared, ranks, dtypes)
    machine, warnings = stages.machine, [*prepared.warnings]
    with stages.optional("the check of device and model", "some warnings may be missing"):
        warnings += device_warnings(machine.info, foreign)
        warnings += model_warnings(subject, ceilings)
    if ranks is not None and ranks.own_cores:
        warnings.append(OWN_CORES)
    health = HealthRecord(idle_power_w=idle_w)
    with stages.optional("the device's settings", "they are not stored with the run"):
        health = replace(health, not_seen=machine.source.missing, settings=machine.source.facts())
    clock_s = None
    with stages.optional("the overhead of a time mark", "it is not stored with the run"):
        clock_s = instrument_s(machine.clock)
    document = opening(prepared, subject, ceilings, dispatch, health, warnings, clock_s)
    document = replace(document, ranks=group.size if group else 1)
    ledger = _opened(prepared, store, document, subject, [ceilings, *dispatch, *contention])
    session = Session(prepared, subject, ledger, stages, budget, ranks, neighbours, fallbacks)
    ended: KeyboardInterrupt | DeviceError | RankError | None = None
    try:
        measure_cells(session, visits)
        if ranks is not None:
            ranks.end()
        measure_options(session, store.folder)
    except (DeviceError, RankError) as error:
        ended = error
    except KeyboardInterrupt as interrupt:
        # torchrun ends the other ranks as soon as one is gone, so a lost rank is the reason.
        ended = group.failure() if group is not None and group.lost() else interrupt
    if ended is None or isinstance(ended, KeyboardInterrupt):
        forecast_missing_cells(session)
    document = replace(_closing(document, subject, stages), fallbacks=tuple(fallbacks), ended_by=str(ended or ""))
    write_document(store.folder, document)
    del ledger, session, subject  # the folder has their content, and judging needs the memory
    if ended:
        clear_frames(ended.__traceback__)  # the traceback's frames hold them as well
    run = judge_folder(store.folder, finished=ended is None)
    if isinstance(ended, RankError):
        raise ended  # torchrun waits for this process to end; `roofscope report` can write the report
    stages.listener.stage("writing the report")
    # Imported late: plotting libraries hold 100 MB, which the roofs' buffers need.
    from profiler.report.write import write_pages, write_reports

    def guard(name: str) -> AbstractContextManager[None]:
        return stages.optional(name, "the file is left out")

    write_reports([run], guard, prepared.effort.pictures)
    if len(stages.missing) > len(document.missing):
        write_document(store.folder, replace(document, missing=tuple(stages.missing)))
        run = judge_folder(store.folder, finished=ended is None)
        write_pages(run, guard, draw="roofline" in prepared.effort.pictures)
    if ended:
        raise ended
    return run


def _opened(
    prepared: PreparedRun, store: RunStore, document: RunDocument, subject: Subject, known: Sequence[Fact]
) -> FactLog:
    """A log of a folder with all that is known before the first cell, and the facts of an interrupted run."""
    gathered = MergedFacts()
    rows: tuple[CellResult, ...] = ()
    if prepared.resumed:
        earlier = read_document(prepared.out)
        refuse_another(earlier, document)
        gathered, rows = read_gathered(prepared.out, earlier), _earlier_rows(prepared.out)
    write_document(store.folder, document)
    write_config(store.folder, config_of(prepared))
    operators = {key: subject.operators_of(key) for key in prepared.grid.keys}
    ledger = FactLog(store, subject.machine, document, operators, gathered)
    peaks = tuple(CellPeak(cell, subject.predicted_peak(cell)) for cell in prepared.grid.cells)
    for fact in (*known, PredictedPeaks(peaks)):
        ledger.add(fact)
    write_operators(store.folder, ledger.facts)
    ledger.begin(rows)
    return ledger


def _earlier_rows(folder: Path) -> tuple[CellResult, ...]:
    """The table of an interrupted run; empty if it cannot be read. At the end all cells are judged again."""
    try:
        return read_results(folder)
    except RunError:
        return ()


def _closing(document: RunDocument, subject: Subject, stages: Stages) -> RunDocument:
    """run.json with the fields that are known only at the end."""
    breaks = {name: engine.graph_breaks for name, engine in subject.engines.items() if engine.graph_breaks is not None}
    skips = {name: engine.graph_skips for name, engine in subject.engines.items() if engine.graph_skips is not None}
    names_by_reason: dict[str, list[str]] = {}
    for name, why in subject.machine.source.failures.items():
        names_by_reason.setdefault(why, []).append(name)
    for why, names in names_by_reason.items():
        stages.miss("telemetry", why, f"{', '.join(names)} cannot be read")
    return replace(
        document,
        engine=replace(document.engine, graph_breaks=breaks, graph_skips=skips),
        health=replace(document.health, not_seen=subject.machine.source.missing),
        missing=tuple(stages.missing),
        stage_s={name: round(seconds, 3) for name, seconds in stages.spent_s().items()},
    )
