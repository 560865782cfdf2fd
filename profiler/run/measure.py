"""The measuring passes of a run after its sweep: replays, trials, hooks, and passes for which an option asks."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from profiler import effort
from profiler.device.contention import Neighbours
from profiler.engines.transformers import GenerateEngine
from profiler.errors import describe_error
from profiler.facts.measurements import FormatLinears, Replays
from profiler.facts.repetitions import Gap
from profiler.fallbacks import Fallback
from profiler.grid.cells import DEFAULT_ENGINE, Cell, extremes
from profiler.judge.changes import promised_s
from profiler.judge.demand import cells_of_disturbed_overhead, cells_of_disturbed_parts
from profiler.judge.judge_run import break_down_run, circumstances_of, judge_run, setting_of, time_run
from profiler.loading.changes import possible_changes
from profiler.loading.request import dtype_name
from profiler.measure.answers import check_quality, measure_drafts
from profiler.measure.hooks_and_traces import experts_touched, hook_cell, time_generate, trace_cell
from profiler.measure.kernels import keys_between, replay_between, replay_kernels
from profiler.measure.linears import time_formats
from profiler.measure.subject import Subject
from profiler.measure.trials import circumstances_here
from profiler.measure.trials import try_changes as trials_of
from profiler.roofs.measure import remeasure_ceilings
from profiler.run.fact_log import FactLog
from profiler.run.options import DEFAULT_NEW_TOKENS
from profiler.run.setup import Pace, overhead_of_model
from profiler.run.stages import Guard, RunBudget, RunPart, Stages
from profiler.run.validate import PreparedRun

# Kernels that were disturbed are replayed again at most this often, each time in this share of the replays' time.
_MOST_REPEATS = 2
_REPEAT_SHARE = 0.2
# Hooking a step takes the time of four: two are hooked, and two are not.
_HOOKED_STEPS = 4
# Trials are left out if there are fewer seconds for them.
_TRIALS_LEAST_S = 2.0
# The ceilings that are measured again: reads, a matrix-vector product, and the matmul of the model's dtype.
_CEILINGS = 3
# Shares of the trials' time, and of the free memory, for the linears of all formats.
_LINEARS_SHARE = 0.2
_LINEARS_MEMORY_SHARE = 0.5

_REPLAYS = "the replays of kernels", "time lost in kernels that have none is unexplained"
_SEARCH = "the search for unexplained time", "its cause is unknown"

_TRACED_STEPS = 3
"""Times that a trace runs the steps of a cell."""
_TRACE_SHARE = 0.05
"""Share of the time left that a default run gives to the trace of one cell."""


@dataclass(frozen=True)
class Session:
    """What the parts of a run share."""

    prepared: PreparedRun
    subject: Subject
    ledger: FactLog
    stages: Stages
    budget: RunBudget
    pace: Pace
    neighbours: Neighbours | None = None
    """Other processes of this machine; None if they cannot be observed."""
    fallbacks: list[Fallback] = field(default_factory=list)
    """Slower code that libraries have reported so far; it grows while they work."""


def explain_cells(session: Session) -> None:
    """Measure what breaks times down: the ceilings once more, kernels in isolation, and parts of `generate`."""
    session.stages.begin("roofs", "measuring the ceilings again")
    if ceiling_s := min(session.budget.part_s(RunPart.CEILINGS_AGAIN) / _CEILINGS, effort.STANDARD.ceilings_again_s):
        with session.stages.optional("the second measurement of the ceilings", "cells are judged by the first"):
            ceilings, dtype = session.ledger.facts.ceilings, dtype_name(session.subject.request.dtype)
            session.ledger.add(remeasure_ceilings(session.subject.machine, ceilings, dtype, ceiling_s))
    if session.subject.loaded.offloaded_bytes:
        return
    timed, engines = session.ledger.gathered.repetitions, session.subject.engines
    measured = [cell for cell in session.prepared.grid.cells if cell in timed and not engines[cell.engine].owned]
    if not measured:
        return
    _replay(session, measured)
    with session.stages.optional("the timing of generate's parts", "its overhead is not broken down"):
        session.ledger.extend(time_generate(session.subject, measured, session.budget.part_s(RunPart.GENERATE)))
    options = session.prepared.options
    is_alone = session.ledger.document.ranks == 1  # the other ranks take part in steps of the sweep only
    if session.subject.machine.is_cuda and is_alone and not (options.breakdown or options.trace):
        with session.stages.optional("the kernels of one step", "their number and median time are unknown"):
            latencies_s = session.ledger.facts.medians_s()
            for cell in extremes([cell for cell in measured if cell.engine == measured[0].engine]):
                steps_s = sum(latencies_s.get(key, 0.0) for key in cell.keys)
                if _TRACED_STEPS * steps_s <= _TRACE_SHARE * session.budget.left_s:
                    session.ledger.extend(trace_cell(session.subject, cell, None))


def _replay(session: Session, measured: list[Cell]) -> None:
    _complete_overhead(session, measured)
    session.stages.begin("replays", "replaying each cell's kernels in isolation")
    with session.stages.optional(*_REPLAYS):
        session.ledger.extend(_replayed(session, measured, 1.0))
        for _ in range(_MOST_REPEATS):
            if session.budget.whole or session.budget.left_s:
                _repeat_parts(session, measured)
        if session.ledger.document.ranks == 1:  # at row counts between those of the cells forecasts need not guess then
            known, budget_s = session.ledger.gathered.replays, session.budget.part_s(RunPart.BETWEEN)
            keys = [key for key in keys_between([key for cell in measured for key in cell.keys]) if key not in known]
            ceilings = session.ledger.facts.ceilings
            session.ledger.extend(replay_between(session.subject, keys, ceilings, budget_s))


def _complete_overhead(session: Session, measured: list[Cell]) -> None:
    """Measure overhead at batch sizes of measured cells for which no time was left before the sweep."""
    known = session.ledger.gathered.overhead
    for name in session.subject.engines:
        begun = {batch for engine, phase, batch in known if (engine, phase) == (name, "decode")}
        missing = {cell.batch_size for cell in measured if cell.engine == name} - begun
        if begun and missing:
            what = f"the CPU overhead of batch {', '.join(map(str, sorted(missing)))}"
            guard = partial(session.stages.optional, what, "the host's share of these steps is unexplained")
            _measure_overhead(session, missing, {name}, guard)


def _measure_overhead(session: Session, batch_sizes: set[int], engines: set[str], guard: Guard | None = None) -> None:
    """Measure overhead at these batch sizes. On a CPU one prefill serves all sizes, also those measured before."""
    sizes, names, known = sorted(batch_sizes), sorted(engines), list(session.ledger.gathered.overhead)
    samples = overhead_of_model(
        session.prepared, session.subject, session.stages, session.budget, sizes, names, guard=guard
    )
    session.ledger.extend(samples)
    prefills = {item.engine: item for item in samples if item.phase == "prefill"}
    for engine, phase, batch in known:
        if phase == "prefill" and batch not in batch_sizes and engine in prefills:
            session.ledger.add(replace(prefills[engine], batch_size=batch))


def _replayed(session: Session, cells: list[Cell], share: float) -> Iterator[Replays]:
    """Replays of these cells' kernels, in this share of the replays' time."""
    steps_s = {} if session.budget.whole else session.ledger.facts.medians_s()
    budget_s, ceilings = share * session.budget.part_s(RunPart.REPLAYS), session.ledger.facts.ceilings
    guard = partial(session.stages.optional, *_REPLAYS)
    return replay_kernels(session.subject, cells, ceilings, budget_s, guard, steps_s)


def _repeat_parts(session: Session, measured: list[Cell]) -> None:
    """Measure overhead again where it took longer than whole steps, and all parts of steps that took less than them."""
    facts = session.ledger.facts
    cells = [cell for cell in cells_of_disturbed_parts(facts) if cell in measured]
    disturbed = [*cells, *(cell for cell in cells_of_disturbed_overhead(facts) if cell in measured)]
    if disturbed:
        sizes, engines = {cell.batch_size for cell in disturbed}, {cell.engine for cell in disturbed}
        if session.subject.machine.captures:  # one measurement serves all sizes, and forecasts compare them
            sizes |= {batch for engine, _, batch in session.ledger.gathered.overhead if engine in engines}
        guard = partial(session.stages.optional, "the overhead again")  # if it fails, the first measurement stands
        _measure_overhead(session, sizes, engines, guard)
    if cells:
        session.stages.begin("replays", "replaying disturbed kernels again")
        session.ledger.extend(_replayed(session, cells, _REPEAT_SHARE))


def try_changes(session: Session, budget_s: float) -> None:
    """Try changes on this machine for so long, unless that is too short to learn anything."""
    subject, ledger = session.subject, session.ledger
    engine = next(iter(subject.engines))
    can_try = engine in (DEFAULT_ENGINE, GenerateEngine.name) and not subject.loaded.offloaded_bytes
    if budget_s < _TRIALS_LEAST_S or not can_try or session.ledger.document.ranks > 1:
        return
    session.stages.begin("trials", "trying changes: their lines, before and after")
    count = len(session.fallbacks)

    def on_failure(change: str, error: Exception) -> None:
        session.stages.miss(f"trying {change}", describe_error(error), "this change has no trial")

    with session.stages.optional("trying changes", "changes that have no trial are computed only"):
        latencies_s = {key: time_s for key, time_s in ledger.facts.medians_s().items() if key.cell.engine == engine}
        tried = trials_of(
            subject,
            session.prepared.config,
            latencies_s,
            possible_changes(circumstances_here(subject, circumstances_of(ledger.facts))),
            budget_s,
            on_failure,
            earlier=[trial for of_cell in ledger.gathered.trials.values() for trial in of_cell],
            savings_s=promised_s(judge_run(ledger.facts).judged, setting_of(ledger.facts)),
        )
        ledger.extend(tried)
    del session.fallbacks[count:]  # those of formats that are only tried


def compare_formats(session: Session) -> None:
    """Time the linears of a step in each format, without the host."""
    subject, known = session.subject, session.ledger.gathered.latest(FormatLinears)
    owned = any(engine.owned for engine in subject.engines.values())
    if (
        session.prepared.options.no_trials
        or known
        or owned
        or subject.loaded.offloaded_bytes
        or session.ledger.document.ranks > 1
    ):
        return
    with session.stages.optional("the linears of other formats", "what formats save without the host is unknown"):
        room_bytes = _LINEARS_MEMORY_SHARE * subject.machine.available_bytes()
        budget_s = _LINEARS_SHARE * session.budget.part_s(RunPart.TRIALS)
        config, ceilings = session.prepared.config, session.ledger.facts.ceilings
        session.ledger.add(time_formats(subject, config, ceilings, room_bytes, budget_s))


def search_unexplained(session: Session) -> None:
    """Hook the cells with much unexplained time, the worst of them in any case."""
    ledger, stages, machine = session.ledger, session.stages, session.subject.machine
    if session.subject.loaded.offloaded_bytes:
        return
    unexplained = stages.tried(*_SEARCH, lambda: break_down_run(time_run(ledger.facts)).unexplained) or ()
    deadline_s = machine.now_s() + session.budget.part_s(RunPart.UNEXPLAINED)
    steps_s = {} if session.budget.whole else ledger.facts.medians_s()
    for number, key in enumerate(unexplained):
        if number > 0 and machine.now_s() > deadline_s:
            break
        has_time = key not in steps_s or machine.now_s() + _HOOKED_STEPS * steps_s[key] <= deadline_s
        if has_time and key not in ledger.gathered.hooked:
            stages.begin("unexplained", f"searching for unexplained time in {key.name}")
            with stages.optional(*_SEARCH):
                hooked_keys = hook_cell(session.subject, key.cell)
                ledger.extend(hooked for hooked in hooked_keys if hooked.key in unexplained)


def skip_the_rest(session: Session) -> tuple[Cell, ...]:
    """Give each cell of a named grid that the budget did not reach its reason; return those of a default grid."""
    gathered = session.ledger.gathered
    known = gathered.repetitions.keys() | gathered.gaps.keys()
    unreached = tuple(cell for cell in session.prepared.grid.cells if cell not in known)
    if not session.prepared.options.names_grid:
        return unreached
    why = f"the budget of {session.budget.total_s:g} s ended before its repetition; a larger --budget reaches it"
    session.ledger.extend(Gap(cell, "skipped", why) for cell in unreached)
    return ()


def measure_options(session: Session) -> None:
    """Measure what options add to the sweep; a trace is written into the run's folder."""
    folder, options, subject = session.prepared.out, session.prepared.options, session.subject
    if (options.breakdown or options.trace) and not subject.loaded.offloaded_bytes:
        session.stages.begin("looking inside", "looking inside a step")
        for name in (name for name, engine in subject.engines.items() if not engine.owned):
            with session.stages.optional(f"the breakdown of {name}'s steps", "its steps are not broken down"):
                cells = [cell for cell in session.ledger.gathered.repetitions if cell.engine == name]
                for cell in cells:
                    session.ledger.extend(hook_cell(subject, cell))
                for number, cell in enumerate(extremes(cells)):
                    session.ledger.extend(trace_cell(subject, cell, folder if options.trace and not number else None))
    if subject.prompts.real:
        with session.stages.optional("the experts that the prompts use", "only their expected number is known"):
            for cell in session.ledger.gathered.repetitions:
                session.ledger.extend(experts_touched(subject, cell))
    if (draft := session.prepared.draft) is not None:
        session.stages.begin("drafts", "answering with and without drafts")
        with session.stages.optional("the answers with drafts", "whether drafts pay is unknown"):
            new_tokens, ceilings = options.new_tokens or DEFAULT_NEW_TOKENS, session.ledger.facts.ceilings
            session.ledger.add(measure_drafts(subject, draft, new_tokens, ceilings))
    if quality_ids := session.prepared.quality_ids:
        session.stages.begin("quality", "comparing the quantised model with the unquantised one")
        with session.stages.optional("the comparison with the unquantised model", "the loss of quality is unknown"):
            session.ledger.add(check_quality(subject.loaded, quality_ids))
