"""The measuring passes of a run, in order: sweep, replays, trials, hooks, and passes that options request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from profiler.device.contention import Neighbours
from profiler.device.telemetry import Watch
from profiler.facts.measurements import PackedBatches, Readings, Replays
from profiler.facts.roofs import swing
from profiler.facts.visits import Gap, Visit
from profiler.fallbacks import Fallback
from profiler.grid.cells import PHASES, Cell, CellKey
from profiler.judge.demand import breakdown_of, cells_of_disturbed_dispatch, cells_of_disturbed_parts
from profiler.judge.judge_run import judge_run
from profiler.judge.levers import promised_s
from profiler.loading.request import dtype_name
from profiler.measure.batching import try_ways
from profiler.measure.dense_twins import packed_batches, packed_linears
from profiler.measure.generate import time_generate
from profiler.measure.idle import steps_after_idle
from profiler.measure.kernels import keys_between, replay_between, replay_kernels
from profiler.measure.module_hooks import hook_cell
from profiler.measure.quality import check_quality
from profiler.measure.subject import Subject
from profiler.measure.sweep import Plan, Progress, expected_sweep_s
from profiler.measure.trace import trace_cell
from profiler.measure.trials import try_variants
from profiler.measure.visit import warm_up
from profiler.predict.from_facts import forecast_missing
from profiler.predict.operator_arrays import OperatorArrays, Paths, StepArrays, operator_arrays
from profiler.roofs.drift_probe import DriftProbe
from profiler.roofs.measure import remeasure_roofs
from profiler.run.budget import RunBudget, RunPart
from profiler.run.cold_start import fresh_starts
from profiler.run.fact_log import FactLog
from profiler.run.neighbours import LOOK, UNSEEN, host_threads
from profiler.run.setup import dispatch_of_twin, other_bytes
from profiler.run.stages import Stages
from profiler.run.tensor_parallel import Ranks
from profiler.run.validate import PreparedRun
from profiler.units import several

# Kernels that were disturbed are replayed again at most this often, each time in this share of the replays' time.
_MOST_REPEATS = 2
_REPEAT_SHARE = 0.2
# Hooking a step takes the time of four: two are hooked, and two are not.
_HOOKED_STEPS = 4
# A visit may exceed the budget by this share before it is given up.
_LATE_SHARE = 0.1
# Trials of variants take at most this many seconds, and are left out below `_LEVERS_LEAST_S`.
_LEVERS_MOST_S = 15.0
# The roofs that are measured again: reads, a matrix-vector product, and the model's own product.
_ROOFS = 3
# With at least this much time for trials code is compiled, too, and trials may take longer. On a GPU the whole model is
# compiled wherever that fits: 32 layers from --budget 180 on.
_COMPILING_FROM_S = 40.0
_COMPILING_MOST_S = 60.0
_LEVERS_LEAST_S = 4.0
# Shares of the trials' time, and of the free memory, for dense linears in place of packed ones.
_DENSE_SHARE = 0.2
_DENSE_MEMORY_SHARE = 0.3

_CHECK_EVERY_S = 2.0
"""Time between checks of the machine, each of which takes a quarter of a second on a CPU."""

_REPLAYS, _NO_REPLAYS = "the replays of kernels", "time lost in kernels that have none is unexplained"
_NO_DRIFT = "a change in the machine's own speed is not detected"
_NOT_SEARCHED = "its cause is unknown"

Sweep = Callable[..., Iterator[Visit | Gap]]
"""Decides which cell is visited when; called with the arguments of `measure.sweep.sweep`."""


@dataclass(frozen=True)
class Session:
    """What the parts of a run share."""

    prepared: PreparedRun
    subject: Subject
    ledger: FactLog
    stages: Stages
    budget: RunBudget
    ranks: Ranks | None
    neighbours: Neighbours | None = None
    """None in a run over several ranks."""
    fallbacks: list[Fallback] = field(default_factory=list)
    """Slower code that libraries have reported so far; it grows while they work."""


def measure_cells(session: Session, visits: Sweep) -> None:
    """Sweep the cells, measure the roofs again, replay kernels, try variants, and search for unexplained time."""
    _sweep(session, visits)
    budget = session.budget
    budget.extend(0.0)
    session.stages.left_s = lambda: budget.left_s + budget.further_s  # not of the session, which holds the model
    if session.ranks is not None:
        _time_shares(session, session.ranks)
    with session.stages.optional("the table of cells during the sweep", "it is written at the end of the run"):
        session.ledger.keep_table()
    _remeasure_roofs(session)
    if session.subject.loaded.offloaded:
        return
    measured = _steppable(session)
    _replay(session, measured)
    if session.ranks is None:
        _time_generate(session, measured)
        count = len(session.fallbacks)
        _try_batching(session)
        _try_levers(session)
        _search_unexplained(session)
        del session.fallbacks[count:]  # those of formats and engines that are only tried


def _sweep(session: Session, visits: Sweep) -> None:
    subject, ledger, stages = session.subject, session.ledger, session.stages
    grid, machine, budget = session.prepared.grid, subject.machine, session.budget
    floors_s = _floors_s(session)
    plan = Plan(
        grid,
        budget.sweep_s,
        session.prepared.whole,
        floors_s=floors_s,
        late_s=_LATE_SHARE * budget.total_s if session.ranks is None else math.inf,
        effort=session.prepared.effort,
    )
    if session.prepared.whole:
        budget.extend(expected_sweep_s(plan))
        stages.left_s = lambda: budget.left_s + budget.further_s
    stages.begin("timing", f"timing {several(len(grid.cells), 'cell', 'cells')}")
    probe = _drift_probe(session)
    own_bytes = other_bytes(subject.engines, machine.allocated_bytes() - subject.held_bytes, subject.model_bytes)

    checked_s = -math.inf

    def check_machine() -> float:
        nonlocal checked_s
        if machine.now_s() - checked_s > _CHECK_EVERY_S:
            if probe is not None:
                with stages.optional("the drift probe", _NO_DRIFT):
                    ledger.add(probe.look())
            _check_neighbours(session)
            checked_s = machine.now_s()
        return swing(ledger.gathered.looks)

    # Cells without a number are tried again: what they lacked, such as memory, may be available now.
    earlier = [visit for visits in ledger.gathered.visits.values() for visit in visits]
    with Watch(machine.source) as watch:
        for name, engine in subject.engines.items():
            cell = replace(grid.cells[0], engine=name)
            warm_up(engine, cell, machine, vocab_size=subject.vocab_size, budget_s=budget.warm_up_s)
        sweep_s = budget.sweep_s
        after_s = budget.after_sweep_s if session.prepared.whole else budget.left_s - sweep_s
        for outcome in visits(
            subject.engines,
            replace(plan, budget_s=sweep_s),
            machine=machine,
            vocab_size=subject.vocab_size,
            own_bytes=own_bytes,
            fits=lambda cell: _no_room(session, cell),
            on_progress=lambda progress: stages.listener.progress(
                _run_progress(progress, budget, after_s), len(grid.cells)
            ),
            before_visits=check_machine,
            earlier=earlier,
        ):
            if isinstance(outcome, Gap):
                _report_lost_visits(session, outcome)
            ledger.add(outcome)
            if machine.is_cuda and isinstance(outcome, Visit) and outcome.wall_s < watch.interval_s:
                watch.look(outcome.at_unix_s + outcome.wall_s / 2)
            if readings := watch.taken():
                ledger.add(Readings(readings))
            with stages.optional("the table of cells during the sweep", "it is written at the end of the run"):
                ledger.judge([outcome.cell])
        check_machine()


def _report_lost_visits(session: Session, gap: Gap) -> None:
    """Record that a cell with a number gets no further visits; after its first failure it gets one more."""
    gathered = session.ledger.gathered
    if gap.cell in gathered.visits and (gap.cell in gathered.gaps or gap.status != "failed"):
        session.stages.miss("later visits of some cells", gap.reason, "their times are from earlier visits")


def _check_neighbours(session: Session) -> None:
    """Record other processes that since the last check took cores which this run needs."""
    if session.neighbours is None:
        return
    with session.stages.optional(LOOK, UNSEEN):
        contention = session.neighbours.look()
        if contention.disturbs(host_threads(session.subject.machine.info)):
            session.ledger.add(contention)


def _run_progress(progress: Progress, budget: RunBudget, after_s: float) -> Progress:
    """Progress with the times of the whole run instead of those of the sweep; `after_s` are those of later parts."""
    left_s = progress.left_s + after_s + budget.further_s
    return replace(progress, elapsed_s=budget.elapsed_s, left_s=left_s)


def _drift_probe(session: Session) -> DriftProbe | None:
    """A probe of the machine's own speed; None if there is no room for its buffers."""
    with session.stages.optional("the drift probe", _NO_DRIFT):
        return DriftProbe(session.subject.machine, session.prepared.effort)
    return None


def _no_room(session: Session, cell: Cell) -> str | None:
    """Why a cell cannot fit into memory; None if it may fit, or if that is unknown."""
    with session.stages.optional("the check for free memory", "cells are tried without it"):
        return session.subject.no_room(cell)
    return None


def _time_shares(session: Session, ranks: Ranks) -> None:
    session.stages.begin("ranks", "timing each rank's own share")
    visited = session.ledger.gathered.visits
    for own in ranks.own_steps([cell for cell in session.prepared.grid.cells if cell in visited]):
        session.ledger.add(own)


def _remeasure_roofs(session: Session) -> None:
    session.stages.begin("roofs", "measuring the roofs again")
    roof_s = min(session.budget.part_s(RunPart.ROOFS) / _ROOFS, session.prepared.effort.roofs_again_s)
    if not roof_s:
        return
    subject, ceilings = session.subject, session.ledger.facts.ceilings
    with session.stages.optional("the second measurement of the roofs", "cells are judged by the first"):
        dtype = dtype_name(subject.request.dtype)
        session.ledger.add(remeasure_roofs(subject.machine, ceilings, dtype, roof_s))


def _steppable(session: Session) -> list[Cell]:
    """Visited cells, without those of engines that own their model."""
    visited, engines = session.ledger.gathered.visits, session.subject.engines
    return [cell for cell in session.prepared.grid.cells if cell in visited and not engines[cell.engine].owns_model]


def _replay(session: Session, measured: list[Cell]) -> None:
    session.stages.begin("replays", "replaying each cell's kernels in isolation")
    if session.ranks is None:
        _complete_dispatch(session, measured)
    with session.stages.optional(_REPLAYS, _NO_REPLAYS):
        for replays in _replayed(session, measured, 1.0):
            session.ledger.add(replays)
        for _ in range(_MOST_REPEATS):
            _repeat_parts(session, measured)
        if session.ranks is None:
            _replay_between(session, measured)


def _complete_dispatch(session: Session, measured: list[Cell]) -> None:
    """Measure dispatch at batch sizes of measured cells for which no time was left before the sweep."""
    known = session.ledger.gathered.dispatch
    missing: dict[str, set[int]] = {}
    for cell in measured:
        begun = any((engine, phase) == (cell.engine, "decode") for engine, phase, _ in known)
        if begun and (cell.engine, "decode", cell.batch_size) not in known:
            missing.setdefault(cell.engine, set()).add(cell.batch_size)
    for engine, sizes in missing.items():
        for dispatch in dispatch_of_twin(
            session.prepared, session.subject, session.stages, session.budget, sorted(sizes), [engine]
        ):
            session.ledger.add(dispatch)


def _replay_between(session: Session, measured: list[Cell]) -> None:
    """Replay linears at row counts between those of the cells, so that forecasts there need not guess."""
    replayed = session.ledger.gathered.replays
    keys = [key for key in keys_between([key for cell in measured for key in cell.keys]) if key not in replayed]
    ceilings, budget_s = session.ledger.facts.ceilings, session.budget.part_s(RunPart.BETWEEN)
    for (replays,) in replay_between((session.subject,), keys, ceilings, budget_s):
        session.ledger.add(replays)


def _replayed(session: Session, cells: list[Cell], share: float) -> Iterator[Replays]:
    """Replays of these cells' kernels, in this share of the replays' time."""

    def on_failure(error: Exception) -> None:
        session.stages.failed(_REPLAYS, error, _NO_REPLAYS)

    steps_s = {} if session.budget.whole else _latencies_s(session.ledger)
    budget_s, ceilings = share * session.budget.part_s(RunPart.REPLAYS), session.ledger.facts.ceilings
    return replay_kernels(session.subject, cells, ceilings, budget_s, on_failure, steps_s)


def _repeat_parts(session: Session, measured: list[Cell]) -> None:
    """Measure dispatch again where it took longer than whole steps, and all parts of steps that took less than them."""
    facts = session.ledger.facts
    cells = [cell for cell in cells_of_disturbed_parts(facts) if cell in measured]
    disturbed = [*cells, *(cell for cell in cells_of_disturbed_dispatch(facts) if cell in measured)]
    if disturbed and session.ranks is None:
        batches, engines = sorted({cell.batch_size for cell in disturbed}), sorted({cell.engine for cell in disturbed})
        for dispatch in dispatch_of_twin(
            session.prepared, session.subject, session.stages, session.budget, batches, engines
        ):
            session.ledger.add(dispatch)
    if cells:
        for replays in _replayed(session, cells, _REPEAT_SHARE):
            session.ledger.add(replays)


def _time_generate(session: Session, measured: list[Cell]) -> None:
    with session.stages.optional("the timing of generate's parts", "its overhead is not broken down"):
        for steps in time_generate(session.subject, measured, session.budget.part_s(RunPart.GENERATE)):
            session.ledger.add(steps)


def _try_batching(session: Session) -> None:
    with session.stages.optional("batching the prompts in other ways", "no other way is compared"):
        latencies_s = _latencies_s(session.ledger)
        for queue in try_ways(session.subject, latencies_s, session.budget.part_s(RunPart.QUEUE)):
            session.ledger.add(queue)


def _try_levers(session: Session) -> None:
    """Try variants of these cells on this machine, unless there is too little time to learn anything."""
    share_s = session.budget.part_s(RunPart.TRIALS)
    compiling = session.subject.machine.is_cuda or share_s >= _COMPILING_FROM_S
    budget_s = min(_COMPILING_MOST_S if compiling else _LEVERS_MOST_S, share_s)
    if session.prepared.options.no_levers or budget_s < _LEVERS_LEAST_S:
        return
    session.stages.begin("levers", "trying other dtypes, formats, caches, attention and engines")
    start_s = session.subject.machine.now_s()
    _compare_with_dense(session, _DENSE_SHARE * budget_s)
    budget_s -= session.subject.machine.now_s() - start_s
    with session.stages.optional("trying changes", "changes that have no trial are computed only"):
        trials, ceilings = session.ledger.gathered.trials, session.ledger.facts.ceilings
        for trial in try_variants(
            session.subject,
            session.prepared.config,
            ceilings,
            _latencies_s(session.ledger),
            budget_s,
            compiling,
            _failed_trial(session),
            known={(key, trial.form) for key, of_cell in trials.items() for trial in of_cell},
            savings_s=promised_s(judge_run(session.ledger.facts).evidence),
        ):
            session.ledger.add(trial)


def _compare_with_dense(session: Session, budget_s: float) -> None:
    """Time the model's packed linears against dense ones at several batches, unless an earlier run did."""
    subject, machine = session.subject, session.subject.machine
    if subject.loaded.offloaded or session.ranks is not None or session.ledger.gathered.latest(PackedBatches):
        return
    with session.stages.optional("the comparison with dense linears", "the break-even batch is unknown"):
        linears, room_bytes = packed_linears(subject.loaded.module), _DENSE_MEMORY_SHARE * machine.available_bytes()
        if found := packed_batches(linears, subject.request.dtype, room_bytes, machine, budget_s):
            session.ledger.add(found)


def _failed_trial(session: Session) -> Callable[[str, Exception], None]:
    def on_failure(form: str, error: Exception) -> None:
        session.stages.failed(f"trying {form}", error, "this change has no trial")

    return on_failure


def _search_unexplained(session: Session) -> None:
    """Hook the cells with much unexplained time, the worst of them in any case."""
    ledger, stages, machine = session.ledger, session.stages, session.subject.machine
    unexplained: Sequence[CellKey] = ()
    with stages.optional("the search for unexplained time", _NOT_SEARCHED):
        unexplained = judge_run(ledger.facts).unexplained
    deadline_s = machine.now_s() + session.budget.part_s(RunPart.UNEXPLAINED)
    steps_s = {} if session.budget.whole else _latencies_s(ledger)
    for number, key in enumerate(unexplained):
        if number > 0 and machine.now_s() > deadline_s:
            break
        has_time = key not in steps_s or machine.now_s() + _HOOKED_STEPS * steps_s[key] <= deadline_s
        if has_time and key not in ledger.gathered.hooked:
            stages.begin("unexplained", f"searching for unexplained time in {key.name}")
            with stages.optional("the search for unexplained time", _NOT_SEARCHED):
                for hooked in hook_cell(session.subject, key.cell):
                    if hooked.key in unexplained:
                        ledger.add(hooked)


def _latencies_s(ledger: FactLog) -> dict[CellKey, float]:
    """Median seconds of every measured step."""
    results = judge_run(ledger.facts).cells
    return {result.key: result.latency_s for result in results if result.status == "ok"}


def _floors_s(session: Session) -> Mapping[CellKey, float]:
    """The least seconds of each step, from which visits are estimated before any is measured."""
    facts, floors_s = session.ledger.facts, dict[CellKey, float]()
    with session.stages.optional("the estimate of the time left", "progress is shown without it"):
        for key in facts.grid.keys:
            floors_s[key] = breakdown_of(facts, key, latency_s=1.0)[0].floor_s
    return floors_s


def forecast_missing_cells(session: Session) -> None:
    """Forecast the cells that the budget did not reach, from those that were measured."""
    subject, ledger = session.subject, session.ledger
    if session.ranks is not None:
        return
    with session.stages.optional("the forecast of cells that were not measured", "they have no time"):
        facts, results = ledger.facts, judge_run(ledger.facts).cells
        for name in (name for name, engine in subject.engines.items() if not engine.owns_model):
            paths = {phase: subject.paths[name, phase] for phase in PHASES}

            def count(keys: Sequence[CellKey], paths: Paths = paths) -> OperatorArrays:
                return operator_arrays(subject.work, StepArrays.of(keys), paths, subject.model_bytes)

            for forecast in forecast_missing(facts, results, count, name):
                ledger.add(forecast)


def measure_options(session: Session, folder: Path) -> None:
    """Measure what the options request besides the sweep; a trace is written into `folder`."""
    options, subject = session.prepared.options, session.subject
    if (options.breakdown or options.trace) and not subject.loaded.offloaded:
        session.stages.begin("looking inside", "looking inside a step")
        for name in (name for name, engine in subject.engines.items() if not engine.owns_model):
            with session.stages.optional(f"the breakdown of {name}'s steps", "its steps are not broken down"):
                _look_inside(session, name, folder if options.trace else None)
    if options.cold:
        _start_cold(session)
    if quality_ids := session.prepared.quality_ids:
        session.stages.begin("quality", "comparing the quantised model with the unquantised one")
        with session.stages.optional("the comparison with the unquantised model", "the loss of quality is unknown"):
            session.ledger.add(check_quality(subject.loaded, quality_ids))


def _look_inside(session: Session, engine: str, trace_folder: Path | None) -> None:
    """Time the module groups in every cell of an engine; trace kernels and gaps in its smallest and largest cell."""
    cells = [cell for cell in session.ledger.gathered.visits if cell.engine == engine]
    for cell in cells:
        for hooked in hook_cell(session.subject, cell):
            session.ledger.add(hooked)
    by_size = sorted(cells, key=lambda cell: cell.batch_size * cell.depth)
    for number, cell in enumerate(dict.fromkeys([*by_size[:1], *by_size[-1:]])):
        for activity in trace_cell(session.subject, cell, None if number else trace_folder):
            session.ledger.add(activity)


def _start_cold(session: Session) -> None:
    subject = session.subject
    session.stages.begin("cold", "starting the model in a fresh process, and stepping it after idle time")
    with session.stages.optional("the cold starts", "the times of a fresh process are unknown"):
        for start in fresh_starts(session.prepared, subject.machine, subject.model_bytes):
            session.ledger.add(start)
    engine, cell = next(iter(subject.engines.values())), session.prepared.grid.cells[0]
    with session.stages.optional("the steps after a pause", "the cost of a pause is unknown"):
        for steps in steps_after_idle(engine, cell, subject.machine, session.prepared.effort.idle_pauses):
            session.ledger.add(steps)
