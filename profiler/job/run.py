"""The main job: load once, measure the roofs, sweep, diagnose, write the run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from profiler.diagnosis import advice
from profiler.diagnosis.series import doubling_tests
from profiler.engines.base import Engine
from profiler.engines.registry import ENGINES
from profiler.grid import DEFAULT_ENGINE, Cell
from profiler.job.demands import expected_visit_s
from profiler.job.judging import Assessment, setting_of
from profiler.job.opening import opening
from profiler.job.request import (
    DEFAULT_BATCH_SIZES,
    DEFAULT_BUDGET_S,
    DEFAULT_NEW_TOKENS,
    Options,
    Prepared,
    prepare,
)
from profiler.job.warnings import cell_warnings, device_warnings, model_warnings, time_warnings
from profiler.loading import (
    ModelRequest,
    dtype_name,
    load,
    quiet_libraries,
)
from profiler.loading.catalog import DEFAULT_MODEL
from profiler.machine.clock import Clock, clock_for
from profiler.machine.device import Device, describe, software
from profiler.machine.telemetry import Watch, complaints, idle_power_w, source_for, summary
from profiler.probes.dispatch import measure_dispatch
from profiler.probes.inside import break_down, carriers
from profiler.probes.kernels import Replayed, replay_kernels
from profiler.probes.quality import check_quality
from profiler.probes.subject import Context, execution_paths, no_room
from profiler.probes.trace import trace_steps
from profiler.record.run import Run, read_document, refuse_another
from profiler.record.store import RunStore
from profiler.report.page import write_reports
from profiler.report.progress import QuietListener
from profiler.roofs.cache import cached
from profiler.roofs.links import measure_links
from profiler.roofs.measure import measure
from profiler.roofs.sentinel import Sentinel, drift
from profiler.roofs.values import Ceilings
from profiler.timing.outcomes import Gap, Visit
from profiler.timing.sweep import Plan, Progress, sweep
from profiler.timing.visit import warm_up
from profiler.work.walk import ModelWork, walk

_WARM_UP_BUDGET_S = 3.0
# Replaying the kernels alone gets this share of the sweep's time.
_REPLAY_SHARE = 0.15
# A residual of more than this share of a step is looked into, for so much of the sweep's time.
_UNEXPLAINED_SHARE = 0.20
_CARRIERS_SHARE = 0.15


class Listener(Protocol):
    """Hears how a run goes; the terminal is one, a Python caller need not be."""

    def stage(self, text: str) -> None:
        """A new stage has begun."""

    def progress(self, progress: Progress, total_cells: int) -> None:
        """A cell is about to be visited."""

    def warn(self, text: str) -> None:
        """Something the user should know."""


def profile(
    model: str = DEFAULT_MODEL,
    *,
    prompt_lens: str | Sequence[int] | None = None,
    batch_sizes: str | Sequence[int] = DEFAULT_BATCH_SIZES,
    context_lens: str | Sequence[int] = (),
    new_tokens: int = DEFAULT_NEW_TOKENS,
    dtype: str = "auto",
    quant: str = "none",
    double_quant: bool = False,
    compute_dtype: str = "auto",
    weights: str = "auto",
    engine: str = DEFAULT_ENGINE,
    attn: str | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    fresh: bool = False,
    breakdown: bool = False,
    trace: bool = False,
    check_quality: bool = False,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    listener: Listener | None = None,
) -> Run:
    """Profile a causal LM and write a run folder; the same job as `roofscope run`.

    `model` is a hub id, a folder, a GGUF file or a card's name. `prompt_lens`, `batch_sizes` and `context_lens`
    (decodes at that depth, without a prefill for it) are numbers or texts in the range grammar; `engine` is one name or
    several with commas. `budget_s` bounds the sweep, whose first round is always finished. `out` defaults to a new
    folder under runs/. `fresh` measures the roofs again though they are under a day old. `breakdown` adds a pass that
    tells where inside a step the time goes, `trace` keeps a Chrome trace of one as well, and `check_quality` holds a
    quantised checkpoint's answers against the unquantised one's. Raises RequestError (or one of its kinds) before
    anything slow when the request is wrong.
    KeyboardInterrupt leaves the cells measured so far in the folder.
    """
    options = Options(
        model=model,
        prompt_lens=prompt_lens,
        batch_sizes=batch_sizes,
        context_lens=context_lens,
        new_tokens=new_tokens,
        dtype=dtype,
        quant=quant,
        double_quant=double_quant,
        compute_dtype=compute_dtype,
        weights=weights,
        engine=engine,
        attn=attn,
        device=device,
        out=out,
        budget_s=budget_s,
        fresh=fresh,
        breakdown=breakdown,
        trace=trace,
        check_quality=check_quality,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    return execute(prepare(options), listener or QuietListener())


def execute(prepared: Prepared, listener: Listener) -> Run:
    """Run a checked request: load, measure the roofs, sweep, diagnose, write."""
    with RunStore(prepared.out, resume=prepared.resumed) as store, quiet_libraries():
        return _execute(prepared, store, listener)


def _execute(prepared: Prepared, store: RunStore, listener: Listener) -> Run:
    request, grid = prepared.request, prepared.grid
    clock = clock_for(request.device)
    source = source_for(request.device)
    idle_w = idle_power_w(source)
    context, engines = _set_up(prepared, clock, listener)
    warnings = [*device_warnings(context.info), *model_warnings(context)]
    for warning in warnings:
        listener.warn(warning)
    document = opening(prepared.request, prepared.grid, context, prepared.command, prepared.budget_s, warnings)
    if prepared.resumed:
        refuse_another(read_document(prepared.out), document)
    store.write_document(document)

    assessment = Assessment(context, grid)
    visits, gaps = store.restored() if prepared.resumed else ({}, {})
    watch = Watch(source)
    interrupted: KeyboardInterrupt | None = None
    inside: list[dict[str, Any]] = []
    active: list[dict[str, Any]] = []
    quality: dict[str, Any] = {}
    try:
        _measure(prepared, context, engines, store, assessment, visits, gaps, watch, listener, clock)
        if (prepared.breakdown or prepared.trace) and not context.loaded.offloaded:
            listener.stage("looking inside a step")
            for name, engine in engines.items():
                cells = [cell for cell in visits if cell.engine == name]
                inside += break_down(context, engine, cells, grid, clock)
                ends = sorted(cells, key=lambda cell: cell.batch_size * cell.depth)
                folder = store.folder if prepared.trace else None
                active += trace_steps(context, engine, list(dict.fromkeys([ends[0], ends[-1]])), grid, folder)
        if prepared.quality_ids:
            listener.stage("holding the quantised model against the unquantised one")
            quality = asdict(check_quality(context.loaded, prepared.quality_ids))
    except KeyboardInterrupt as interrupt:
        interrupted = interrupt
    for cell, known in visits.items():
        if not assessment.has(cell):
            assessment.measured(cell, known)
    for gap in gaps.values():
        assessment.missed(gap)
    warnings += [*complaints(watch.readings), *cell_warnings(assessment.judged, gaps), *time_warnings(visits)]
    document = document.model_copy(
        update={
            "health": {
                **summary(watch.readings, watch.source.missing),
                **watch.source.facts(),
                "idle_power_w": idle_w,
            },
            "evidence": assessment.evidence,
            "answer": advice.answer(assessment.judged, setting_of(context)),
            "warnings": warnings,
            "scaling": doubling_tests(
                assessment.cells,
                context.ceilings.compute_flops_per_s(context.dtype),
                context.ceilings.memory_bytes_per_s,
            ),
            "engine": {
                **document.engine,
                "preparation_s": _preparation_s(visits),
                "graph_breaks": {
                    name: engine.graph_breaks for name, engine in engines.items() if hasattr(engine, "graph_breaks")
                },
                "differences": assessment.differences,
            },
            "breakdown": inside,
            "quality": quality,
            "activity": active,
            "finished": interrupted is None,
        }
    )
    run = Run(store.folder, document, assessment.cells)
    store.write_cells(run.cells)
    store.write_document(document)
    write_reports(run)
    if interrupted:
        raise interrupted
    return run


def _set_up(prepared: Prepared, clock: Clock, listener: Listener) -> tuple[Context, dict[str, Engine]]:
    """Load the model, measure the roofs and dispatch: all that a cell is held against."""
    request, grid = prepared.request, prepared.grid
    info = describe(request.device)
    listener.stage(f"loading {request.source.name} ({dtype_name(request.dtype)}, {request.weights} weights)")
    loaded = load(request, prepared.config)
    work = walk(loaded.module)
    engines = {name: ENGINES[name](loaded.module) for name in grid.engines}
    listener.stage("measuring this device's roofs")
    ceilings = measure_ceilings(request, info, work, clock, fresh=prepared.fresh)
    ceilings = replace(ceilings, links=measure_links(sorted(loaded.offloaded_bytes), request.device, clock))
    listener.stage("measuring dispatch on the hollow twin")
    context = Context(
        loaded=loaded,
        work=work,
        paths=execution_paths(loaded, work, engines, grid),
        info=info,
        ceilings=ceilings,
        dispatch=measure_dispatch(loaded, prepared.config, clock, grid.batch_sizes, grid.engines),
        dtype=dtype_name(request.dtype),
    )
    return context, engines


def _measure(
    prepared: Prepared,
    context: Context,
    engines: dict[str, Engine],
    store: RunStore,
    assessment: Assessment,
    visits: dict[Cell, list[Visit]],
    gaps: dict[Cell, Gap],
    watch: Watch,
    listener: Listener,
    clock: Clock,
) -> None:
    """Sweep the cells, then replay their kernels; `visits`, `gaps` and the folder grow as it goes."""
    device, grid = prepared.request.device, prepared.grid
    vocab_size = context.loaded.config.get_text_config().vocab_size
    earlier: list[Visit | Gap] = [*gaps.values(), *(visit for known in visits.values() for visit in known)]
    for cell, known in visits.items():
        assessment.measured(cell, known)
    store.write_cells(assessment.cells)
    listener.stage("timing")
    sentinel = Sentinel(device, clock)
    looks: list[Mapping[str, float]] = []

    def look() -> None:
        looks.append(sentinel.look())
        store.append({"kind": "sentinel", "at_unix_s": time.time(), **looks[-1]})

    with watch:
        for name, engine in engines.items():
            cell = replace(grid.cells[0], engine=name)
            warm_up(engine, cell, device=device, clock=clock, vocab_size=vocab_size, budget_s=_WARM_UP_BUDGET_S)
        for outcome in sweep(
            engines,
            Plan(grid, prepared.budget_s, expected_s=expected_visit_s(context, grid)),
            device=device,
            clock=clock,
            vocab_size=vocab_size,
            fits=lambda cell: no_room(cell, context, grid),
            on_progress=lambda progress: listener.progress(progress, len(grid.cells)),
            on_round=look,
            energy_j=watch.source.energy_j,
            earlier=earlier,
        ):
            store.append(_record(outcome))
            if isinstance(outcome, Gap):
                gaps[outcome.cell] = outcome
                assessment.missed(outcome)
            else:
                visits.setdefault(outcome.cell, []).append(outcome)
                assessment.measured(outcome.cell, visits[outcome.cell])
            store.write_cells(assessment.cells)
        look()
    measured = [cell for cell in grid.cells if cell in visits]
    replayed: Replayed = {}
    if not context.loaded.offloaded:
        listener.stage("replaying each cell's kernels alone")
        replayed = replay_kernels(context, measured, grid, clock, _REPLAY_SHARE * prepared.budget_s)
    sides = assessment.sides()
    for cell in measured:
        slowed = {name for visit in visits[cell] for name in watch.throttled(visit.at_unix_s, visit.wall_s)}
        active = watch.active([(visit.at_unix_s, visit.wall_s) for visit in visits[cell]])
        assessment.measured(cell, visits[cell], replayed, sorted(slowed), drift(looks), sides, active)
    deadline = time.perf_counter() + _CARRIERS_SHARE * prepared.budget_s
    for phase, cell in assessment.unexplained(_UNEXPLAINED_SHARE):
        if time.perf_counter() > deadline or context.loaded.offloaded:
            break
        listener.stage(f"looking for what is unexplained in {phase} batch {cell.batch_size} x {cell.depth}")
        alone = replayed.get((phase, cell), {})
        assessment.carried(phase, cell, carriers(context, engines[cell.engine], cell, phase, grid, clock, alone))


def _record(outcome: Visit | Gap) -> dict[str, Any]:
    record = asdict(outcome)
    return {"kind": type(outcome).__name__.lower(), **record.pop("cell"), **record}


def measure_ceilings(request: ModelRequest, info: Device, work: ModelWork, clock: Clock, *, fresh: bool) -> Ceilings:
    """The roofs of this device for the dtypes of a model's products; kept for a day unless `fresh`."""
    dtypes, model_dtype = _roof_dtypes(work, request), dtype_name(request.dtype)

    def measure_missing(known: Ceilings | None) -> Ceilings:
        return measure(request.device, info, dtypes, model_dtype=model_dtype, clock=clock, known=known)

    return cached(measure_missing, info, software(), fresh=fresh).only(dtypes, model_dtype)


def _roof_dtypes(work: ModelWork, request: ModelRequest) -> list[str]:
    """The dtypes that this model's products run in; float32 as the yardstick, and bfloat16 as the way out of it."""
    used = {dtype_name(operator.dtype) for operator in work.operators if operator.dtype.itemsize > 0}
    return sorted({"float32", "bfloat16", dtype_name(request.dtype), *used})


def _preparation_s(visits: Mapping[Cell, Sequence[Visit]]) -> dict[str, float]:
    """Seconds that each engine spent on compiling or capturing, over all its shapes."""
    total: dict[str, float] = {}
    for cell, known in visits.items():
        total[cell.engine] = total.get(cell.engine, 0.0) + sum(visit.preparation_s for visit in known)
    return total
