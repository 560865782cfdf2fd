"""The main job: load once, measure the roofs, sweep, replay, and judge what came of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from profiler.diagnosis.facts import CellPeak, DispatchSamples, Facts, PredictedPeaks, Readings
from profiler.diagnosis.parts import split_of
from profiler.diagnosis.run import judge_run
from profiler.engines.registry import OWNING
from profiler.errors import DeviceError, RankError, RequestError, first_line
from profiler.grid import Cell, CellKey
from profiler.job.cold import fresh_starts
from profiler.job.engines import beside, make_engines
from profiler.job.judging import judge_folder
from profiler.job.ledger import Ledger
from profiler.job.opening import config_of, opening
from profiler.job.options import Options, known_options
from profiler.job.ranks import Ranks, set_up_ranks
from profiler.job.request import Prepared, prepare
from profiler.job.warnings import device_warnings, model_warnings
from profiler.loading.load import load
from profiler.loading.request import ModelRequest, dtype_name
from profiler.loading.skeleton import quiet_libraries
from profiler.machine.device import software
from profiler.machine.machine import Machine, machine_for
from profiler.machine.ranks import Group
from profiler.machine.telemetry import Watch, idle_power_w
from profiler.probes.dispatch import measure_dispatch
from profiler.probes.generate import time_generate
from profiler.probes.inside import hook_cell
from profiler.probes.kernels import replay_kernels
from profiler.probes.quality import check_quality
from profiler.probes.ragged import try_ways
from profiler.probes.silence import steps_after_silence
from profiler.probes.subject import Subject, execution_paths
from profiler.probes.trace import trace_cell
from profiler.probes.trials import try_forms
from profiler.record.document import HealthRecord, RunDocument
from profiler.record.gathered import Gathered
from profiler.record.run import Run, read_document, read_gathered, refuse_another
from profiler.record.samples import Fact
from profiler.record.store import RunStore
from profiler.report.page import write_reports
from profiler.report.progress import QuietListener
from profiler.roofs.cache import cached
from profiler.roofs.host import measure_host_pace
from profiler.roofs.links import measure_links
from profiler.roofs.measure import look_again, measure
from profiler.roofs.sentinel import Sentinel
from profiler.roofs.values import Ceilings, swing
from profiler.roofs.weights import measure_weights
from profiler.timing.outcomes import Gap, Visit
from profiler.timing.sweep import Plan, Progress, sweep
from profiler.timing.visit import warm_up
from profiler.work.walk import ModelWork, walk

_WARM_UP_BUDGET_S = 3.0
# Replaying the kernels alone gets this share of the sweep's time.
_REPLAY_SHARE = 0.15
# Timing the parts of `generate` gets this share of it, and one cell at least.
_GENERATE_SHARE = 0.1
# Batching a queue of unequal prompts in other ways gets this share of it.
_QUEUE_SHARE = 0.25
# Stepping the hollow twin, for each phase, batch size and engine.
_TWIN_SHARE = 0.075
_TWIN_MOST_S = 1.5
# Reading the model's own weights as a witness of the memory roof.
_WITNESS_S = 0.5
# Looking at each roof once more takes this share of it, and no longer than so many seconds.
_AGAIN_SHARE = 0.02
_AGAIN_MOST_S = 0.5
# Looking for what carries large residuals gets this share of it.
_CARRIERS_SHARE = 0.15

# Trying other forms gets this share of it, within limits: a few seconds would tell nothing.
_LEVERS_SHARE = 0.25
_LEVERS_MOST_S = 15.0
_LEVERS_LEAST_S = 4.0


Sweep = Callable[..., Iterator[Visit | Gap]]
"""What decides which cell is visited when, with the arguments of `timing.sweep.sweep`."""


class Listener(Protocol):
    """Hears how a run goes; the terminal is one, a Python caller need not be."""

    def stage(self, text: str) -> None:
        """A new stage has begun."""

    def progress(self, progress: Progress, total_cells: int) -> None:
        """A cell is about to be visited."""


def profile(model: str | None = None, *, listener: Listener | None = None, **options: Any) -> Run:
    """Profile a causal LM and write a run folder; the same job as `roofscope run`.

    `model` is a hub id, a folder, a GGUF file or a card's name (none: the default model); `options` are the fields of
    `profiler.job.options.Options`: `prompt_lens`, `batch_sizes` and `context_lens` as numbers or texts in the range
    grammar, `engine` as one name or several with commas, `budget_s` to bound the sweep, whose first round is always
    finished, `out` for the folder (default: a new one under `runs/`). Raises RequestError for a request that cannot be
    met, before anything is loaded.
    """
    known_options(list(options))
    return execute(prepare(Options(model=model, **options)), listener or QuietListener())


def execute(prepared: Prepared, listener: Listener, visits: Sweep = sweep, group: Group | None = None) -> Run:
    """Run a checked request: load, measure the roofs, sweep, judge, write; `visits` decides what is visited when.

    With a `group` this is its rank 0, and the others follow (`ranks.follow_rank`).
    """
    with RunStore(prepared.out, resume=prepared.resumed) as store, quiet_libraries():
        if group is not None:
            prepared = replace(prepared, request=replace(prepared.request, device=group.device))
        return _execute(prepared, store, _Stages(listener, machine_for(prepared.request.device)), visits, group)


class _Stages:
    """Tells a listener what goes on, and keeps how long each stage took."""

    def __init__(self, listener: Listener, machine: Machine) -> None:
        self.listener = listener
        self.machine = machine
        self._now = ""
        self._since_s = machine.now_s()
        self._spent_s: dict[str, float] = {}

    def begin(self, name: str, text: str = "") -> None:
        """End the stage so far and begin the next; several of one name add up."""
        self._end()
        self._now = name
        self.listener.stage(text or name)

    def spent_s(self) -> dict[str, float]:
        """Seconds by stage, the one that goes on included."""
        self._end()
        return dict(self._spent_s)

    def _end(self) -> None:
        now_s = self.machine.now_s()
        if self._now:
            self._spent_s[self._now] = self._spent_s.get(self._now, 0.0) + now_s - self._since_s
        self._since_s = now_s


def _execute(prepared: Prepared, store: RunStore, stages: _Stages, visits: Sweep, group: Group | None) -> Run:
    machine = stages.machine
    idle_w = idle_power_w(machine.source)
    ranks = None
    if group is None:
        subject, ceilings, dispatch = _set_up(prepared, stages)
    else:
        stages.begin("loading", f"loading {prepared.request.source.name} over {group.size} ranks")
        ranks = Ranks(prepared, group, machine)
        stages.begin("roofs", "measuring the roofs of all ranks at once, and the link between them")
        subject, ceilings, dispatch = set_up_ranks(prepared, ranks, _roof_dtypes(ranks.work, prepared.request))
    warnings = [*device_warnings(machine.info), *model_warnings(subject, ceilings, bool(dispatch))]
    health = HealthRecord(not_seen=machine.source.missing, idle_power_w=idle_w, settings=machine.source.facts())
    document = opening(prepared, subject, ceilings, dispatch, health, warnings)
    document = replace(document, ranks=group.size if group else 1)
    gathered = Gathered()
    if prepared.resumed:
        earlier = read_document(prepared.out)
        refuse_another(earlier, document)
        gathered = read_gathered(prepared.out, earlier)
    store.write_document(document)
    store.write_config(config_of(prepared))
    operators = {key: subject.operators_of(key) for key in prepared.grid.keys}
    ledger = Ledger(store, machine, document, operators, gathered)
    peaks = tuple(CellPeak(cell, subject.predicted_peak(cell)) for cell in prepared.grid.cells)
    measured: list[Fact] = [ceilings, *dispatch, PredictedPeaks(peaks)]
    for fact in measured:
        ledger.add(fact)
    store.write_operators(ledger.facts)
    ledger.judge(prepared.grid.cells)
    ended: KeyboardInterrupt | DeviceError | RankError | None = None
    try:
        _measure(prepared, subject, ledger, stages, visits, ranks)
        if ranks is not None:
            ranks.end()
        _look_inside(prepared, subject, ledger, stages, store)
    except (DeviceError, RankError) as error:
        ended = error
    except KeyboardInterrupt as interrupt:
        # torchrun ends the other ranks as soon as one is gone: then that is the reason.
        ended = group.failure() if group is not None and group.lost() else interrupt
    document = replace(document, ended_by=str(ended or ""))
    store.write_document(_closing(document, subject, stages, finished=ended is None))
    run = judge_folder(store.folder)
    if isinstance(ended, RankError):
        raise ended  # torchrun waits for this process to end: `roofscope report` draws what was kept
    stages.listener.stage("writing the report")
    write_reports([run])
    if ended:
        raise ended
    return run


def _closing(document: RunDocument, subject: Subject, stages: _Stages, *, finished: bool) -> RunDocument:
    """What is known at the end alone."""
    breaks = {name: engine.graph_breaks for name, engine in subject.engines.items() if engine.graph_breaks is not None}
    return replace(
        document,
        engine=replace(document.engine, graph_breaks=breaks),
        health=replace(document.health, not_seen=subject.machine.source.missing),
        stage_s={name: round(seconds, 3) for name, seconds in stages.spent_s().items()},
        finished=finished,
    )


def _set_up(prepared: Prepared, stages: _Stages) -> tuple[Subject, Ceilings, list[DispatchSamples]]:
    """Load the model, measure the roofs and dispatch: all that a cell is held against."""
    request, grid, machine = prepared.request, prepared.grid, stages.machine
    stages.begin("loading", f"loading {request.source.name} ({dtype_name(request.dtype)}, {request.weights} weights)")
    loaded = load(request, prepared.config)
    work = walk(loaded.module)
    for name in OWNING.keys() & set(grid.engines):
        stages.begin(f"loading into {name}", f"{name} loads the model, compiles it and warms up")
    engines = make_engines(prepared, loaded, work, machine)
    stages.begin("roofs", "measuring this device's roofs")
    ceilings = measure_ceilings(request, machine, work, fresh=prepared.options.fresh)
    ceilings = replace(
        ceilings,
        links=measure_links(sorted(loaded.offloaded_bytes), machine),
        weights=measure_weights(loaded.module.parameters(), machine, _WITNESS_S),
    )
    stages.begin("dispatch", "measuring dispatch on the hollow twin")
    subject = Subject(machine, loaded, work, engines, execution_paths(loaded, work, engines, grid), grid)
    twin_s = min(_TWIN_SHARE * prepared.options.budget_s, _TWIN_MOST_S)
    dispatch = measure_dispatch(loaded, prepared.config, machine, grid.batch_sizes, grid.engines, twin_s)
    return subject, ceilings, dispatch


def _measure(
    prepared: Prepared, subject: Subject, ledger: Ledger, stages: _Stages, visits: Sweep, ranks: Ranks | None
) -> None:
    """Sweep the cells, replay their kernels, and look for what neither explains."""
    grid, machine, budget_s = prepared.grid, subject.machine, prepared.options.budget_s
    stages.begin("timing")
    before_bytes = machine.allocated_bytes()
    sentinel = Sentinel(machine)
    own_bytes = beside(subject.engines, machine.allocated_bytes() - before_bytes, subject.model_bytes)

    def look() -> float:
        ledger.add(sentinel.look())
        return swing(ledger.gathered.looks)

    earlier: list[Visit | Gap] = [*ledger.gathered.gaps.values()]
    earlier += [visit for visits in ledger.gathered.visits.values() for visit in visits]
    with Watch(machine.source) as watch:
        for name, engine in subject.engines.items():
            cell = replace(grid.cells[0], engine=name)
            warm_up(engine, cell, machine, vocab_size=subject.vocab_size, budget_s=_WARM_UP_BUDGET_S)
        for outcome in visits(
            subject.engines,
            Plan(grid, budget_s, expected_s=_expected_visit_s(ledger.facts)),
            machine=machine,
            vocab_size=subject.vocab_size,
            own_bytes=own_bytes,
            fits=subject.no_room,
            on_progress=lambda progress: stages.listener.progress(progress, len(grid.cells)),
            on_round=look,
            earlier=earlier,
        ):
            ledger.add(outcome)
            if machine.is_cuda and isinstance(outcome, Visit) and outcome.wall_s < watch.interval_s:
                watch.look(outcome.at_unix_s + outcome.wall_s / 2)
            if readings := watch.taken():
                ledger.add(Readings(readings))
            ledger.judge([outcome.cell])
        look()
    if ranks is not None:
        stages.begin("ranks", "timing each rank's own share")
        for own in ranks.own_steps([cell for cell in grid.cells if cell in ledger.gathered.visits]):
            ledger.add(own)
    ledger.keep_table()
    stages.begin("roofs", "looking at the roofs again")
    again_s = min(_AGAIN_SHARE * budget_s, _AGAIN_MOST_S)
    if again := look_again(machine, ledger.facts.ceilings, dtype_name(subject.request.dtype), again_s):
        ledger.add(again)
    if subject.loaded.offloaded:
        return
    stages.begin("replays", "replaying each cell's kernels alone")
    measured = [
        cell for cell in grid.cells if cell in ledger.gathered.visits and not subject.engines[cell.engine].owns_model
    ]
    with _cut_short(stages, "the replays"):
        for replays in replay_kernels(subject, measured, _REPLAY_SHARE * budget_s):
            ledger.add(replays)
    if ranks is not None:
        return
    with _cut_short(stages, "looking inside generate"):
        for steps in time_generate(subject, measured, _GENERATE_SHARE * budget_s):
            ledger.add(steps)
    with _cut_short(stages, "batching the prompts otherwise"):
        for queue in try_ways(subject, _latencies_s(ledger), _QUEUE_SHARE * budget_s):
            ledger.add(queue)
    with _cut_short(stages, "trying levers"):
        _try_levers(prepared, subject, ledger, stages)
    deadline_s = machine.now_s() + _CARRIERS_SHARE * budget_s
    for key in judge_run(ledger.facts).unexplained:
        if machine.now_s() > deadline_s:
            break
        if key not in ledger.gathered.hooked:
            stages.begin("unexplained", f"looking for what is unexplained in {key.name}")
            with _cut_short(stages, key.name):
                for hooked in hook_cell(subject, key.cell):
                    if hooked.key == key:
                        ledger.add(hooked)


@contextlib.contextmanager
def _cut_short(stages: _Stages, what: str) -> Iterator[None]:
    """What is measured beside the sweep ends early where it runs out of memory or fails; the sweep's figures stand."""
    try:
        yield
    except DeviceError:
        raise
    except (RuntimeError, RequestError) as error:
        stages.listener.stage(f"{what} ended early: {first_line(error)}")
    else:
        return
    gc.collect()
    if trouble := stages.machine.trouble():
        raise DeviceError(f"the device is lost since {what}: {trouble}; what was measured is kept.")
    stages.machine.release()


def _try_levers(prepared: Prepared, subject: Subject, ledger: Ledger, stages: _Stages) -> None:
    """Try what else this machine could do with these cells, unless there is too little time to learn anything."""
    budget_s = min(_LEVERS_MOST_S, _LEVERS_SHARE * prepared.options.budget_s)
    if prepared.options.no_levers or budget_s < _LEVERS_LEAST_S:
        return
    stages.begin("levers", "trying other dtypes, formats, caches and attention on a few layers")
    if not ledger.gathered.trials:
        for trial in try_forms(subject, prepared.config, _latencies_s(ledger), budget_s):
            ledger.add(trial)


def _latencies_s(ledger: Ledger) -> dict[CellKey, float]:
    """The time of every cell that has one."""
    results = judge_run(ledger.facts).cells
    return {result.key: result.latency_s for result in results if result.latency_s == result.latency_s}


def _look_inside(prepared: Prepared, subject: Subject, ledger: Ledger, stages: _Stages, store: RunStore) -> None:
    """What was asked for beside the sweep: groups within a step, kernels and gaps, the quality of a quantised model."""
    wants = prepared.options
    if (wants.breakdown or wants.trace) and not subject.loaded.offloaded:
        stages.begin("looking inside", "looking inside a step")
        for name in (name for name, engine in subject.engines.items() if not engine.owns_model):
            cells = [cell for cell in ledger.gathered.visits if cell.engine == name]
            with _cut_short(stages, f"looking inside {name}"):
                for hooked in (hooked for cell in cells for hooked in hook_cell(subject, cell)):
                    ledger.add(hooked)
                ends = sorted(cells, key=lambda cell: cell.batch_size * cell.depth)
                for number, cell in enumerate(dict.fromkeys([*ends[:1], *ends[-1:]])):
                    folder = store.folder if wants.trace and number == 0 else None
                    for activity in trace_cell(subject, cell, folder):
                        ledger.add(activity)
    if wants.cold:
        stages.begin("cold", "starting the model in a fresh process, and stepping it after silence")
        with _cut_short(stages, "the cold starts"):
            for start in fresh_starts(prepared):
                ledger.add(start)
        first = next(iter(subject.engines))
        with _cut_short(stages, "steps after silence"):
            for steps in steps_after_silence(subject.engines[first], prepared.grid.cells[0], subject.machine):
                ledger.add(steps)
    if prepared.quality_ids:
        stages.begin("quality", "holding the quantised model against the unquantised one")
        ledger.add(check_quality(subject.loaded, prepared.quality_ids))


def _expected_visit_s(facts: Facts) -> Mapping[Cell, float]:
    """The floor of a whole visit of each cell, used to tell the time left before any was measured."""
    expected: dict[Cell, float] = {}
    for key in facts.grid.keys:
        times = 2 if key.phase == "prefill" else key.cell.decode_steps
        floor_s = split_of(facts, key, latency_s=1.0)[0].floor_s
        expected[key.cell] = expected.get(key.cell, 0.0) + times * floor_s
    return expected


def measure_ceilings(request: ModelRequest, machine: Machine, work: ModelWork, *, fresh: bool) -> Ceilings:
    """The roofs of this device for the dtypes of a model's products; kept for a day unless `fresh`."""
    dtypes, model_dtype = _roof_dtypes(work, request), dtype_name(request.dtype)

    def measure_missing(known: Ceilings | None) -> Ceilings:
        roofs = measure(machine, dtypes, model_dtype=model_dtype, known=known)
        return replace(roofs, host=roofs.host or measure_host_pace(machine))

    return cached(measure_missing, machine.info, software(), fresh=fresh).only(dtypes, model_dtype)


def _roof_dtypes(work: ModelWork, request: ModelRequest) -> list[str]:
    """The dtypes that this model's products run in; float32 as the yardstick, and bfloat16 as the way out of it."""
    used = {dtype_name(operator.dtype) for operator in work.operators if operator.dtype.itemsize > 0}
    return sorted({"float32", "bfloat16", dtype_name(request.dtype), *used})
