"""The main job: load once, measure the roofs, sweep, diagnose, write the run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, get_args

from profiler.assessment import Assessment, setting_of
from profiler.breakdown import break_down, carriers
from profiler.catalog import DEFAULT_MODEL, resolve
from profiler.clock import Clock, clock_for
from profiler.context import Context, execution_paths, no_room
from profiler.diagnosis import advice
from profiler.document import opening, repeating
from profiler.errors import RequestError, RunError, near_misses
from profiler.grid import DEFAULT_ENGINE, Cell, Grid, make_grid
from profiler.hardware.ceilings import Ceilings, measure, measure_links
from profiler.hardware.ceilings_cache import cached
from profiler.hardware.device import Device, describe, software
from profiler.hardware.sentinel import Sentinel, drift
from profiler.hardware.telemetry import Watch, complaints, idle_power_w, source_for, summary
from profiler.isolation import measure_dispatch, replay_kernels
from profiler.loading import (
    DTYPES,
    QUANTS,
    ModelRequest,
    QuantOptions,
    check_context,
    check_quant,
    check_weights,
    dtype_name,
    load,
    load_config,
    quiet_libraries,
    resolve_device,
    resolve_dtype,
    resolve_weights,
)
from profiler.notices import cell_warnings, device_warnings, model_warnings, time_warnings
from profiler.quality import check_quality, text_ids
from profiler.report.page import write_reports
from profiler.report.progress import QuietListener
from profiler.rows import Replayed, expected_visit_s
from profiler.runstore import Run, RunStore, read_document, refuse_another
from profiler.series import doubling_tests
from profiler.timing.engines import ENGINES, Engine, check_engine
from profiler.timing.outcomes import Gap, Visit
from profiler.timing.sweep import Plan, Progress, sweep, warm_up
from profiler.trace import trace_steps
from profiler.work.step import Attention
from profiler.work.walk import ModelWork, walk

DEFAULT_BUDGET_S = 70.0
DEFAULT_PROMPT_LENS = "64,128,256,512"
DEFAULT_BATCH_SIZES = "1,2,4,8"
DEFAULT_NEW_TOKENS = 32

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


@dataclass(frozen=True)
class Options:
    """What a user asks for, in the words of `roofscope run`."""

    model: str = DEFAULT_MODEL
    prompt_lens: str | Sequence[int] | None = None
    """None: the default lengths, or none at all where context lengths are given."""
    batch_sizes: str | Sequence[int] = DEFAULT_BATCH_SIZES
    context_lens: str | Sequence[int] = ()
    new_tokens: int = DEFAULT_NEW_TOKENS
    dtype: str = "auto"
    quant: str = "none"
    double_quant: bool = False
    compute_dtype: str = "auto"
    weights: str = "auto"
    engine: str = DEFAULT_ENGINE
    attn: str | None = None
    device: str = "auto"
    out: str | Path | None = None
    budget_s: float = DEFAULT_BUDGET_S
    fresh: bool = False
    breakdown: bool = False
    trace: bool = False
    check_quality: bool = False
    trust_remote_code: bool = False
    allow_pickle: bool = False


@dataclass(frozen=True)
class Prepared:
    """A request that has been checked, before anything slow: what to load, what to visit, where to write."""

    request: ModelRequest
    config: Any
    grid: Grid
    budget_s: float
    fresh: bool
    breakdown: bool
    trace: bool
    """Whether a Chrome trace of one decode step is kept."""
    quality_ids: Sequence[int]
    """Tokens over which a quantised model is held against the unquantised one; empty: it is not."""
    out: Path
    resumed: bool
    """Whether `out` holds an interrupted run that is to be finished."""
    command: str


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


def prepare(options: Options) -> Prepared:
    """Check a request; raises RequestError with one line before anything is loaded or written."""
    quant = options.quant
    prompts = DEFAULT_PROMPT_LENS if options.prompt_lens is None and not options.context_lens else options.prompt_lens
    engines = [name.strip() for name in options.engine.split(",") if name.strip()] or [DEFAULT_ENGINE]
    grid = make_grid(prompts or (), options.batch_sizes, options.new_tokens, options.context_lens, engines)
    if quant not in QUANTS:
        raise RequestError(f"--quant {quant!r} is unknown; use {', '.join(QUANTS)}.{near_misses(quant, QUANTS)}")
    if options.attn is not None and options.attn not in get_args(Attention):
        raise RequestError(f"--attn {options.attn!r} is unknown; use {', '.join(get_args(Attention))}.")
    if options.budget_s <= 0:
        raise RequestError(f"--budget {options.budget_s:g} is not possible; give seconds above 0.")
    if options.compute_dtype != "auto" and options.compute_dtype not in DTYPES:
        raise RequestError(f"--compute-dtype {options.compute_dtype!r} is unknown; use auto, {', '.join(DTYPES)}.")
    source = resolve(options.model)
    where = resolve_device(options.device)
    config = load_config(source, options.trust_remote_code)
    dtype = resolve_dtype(options.dtype, quant, where, config)
    quant_options = QuantOptions(options.double_quant, DTYPES.get(options.compute_dtype))
    check_quant(quant, quant_options, dtype, where)
    if source.kind == "gguf" and quant != "none":
        raise RequestError(
            f"--quant {quant}: transformers dequantises a GGUF file and does not quantise it again;"
            " give the model as a hub id or a folder of safetensors."
        )
    check_context(config, grid.longest_context)
    for name in grid.engines:
        check_engine(name, where, config, grid.longest_context)
    request = ModelRequest(
        source=source,
        device=where,
        dtype=dtype,
        quant=quant,
        quant_options=quant_options,
        weights=resolve_weights(source, options.weights),
        attn=options.attn,
        trust_remote_code=options.trust_remote_code,
        allow_pickle=options.allow_pickle,
    )
    check_weights(request)
    checked = options.check_quality and quant != "none" and request.weights == "checkpoint"
    return Prepared(
        request=request,
        config=config,
        grid=grid,
        budget_s=options.budget_s,
        fresh=options.fresh,
        breakdown=options.breakdown,
        trace=options.trace,
        quality_ids=text_ids(request) if checked else (),
        out=Path(options.out) if options.out is not None else _default_folder(request),
        resumed=False,
        command=repeating(request, grid),
    )


def prepare_resume(folder: Path, model: str | None, options: Options) -> Prepared:
    """The request of an interrupted run, to finish it; `model` is needed again where it was a local path.

    Of `options` only what a run folder does not hold is taken: the device, the budget and what is trusted. Raises
    RunError when the run is finished or cannot be read, and whatever `prepare` raises.
    """
    document = read_document(folder)
    if document.finished:
        raise RunError(f"{folder} is finished; there is nothing to resume.")
    known, grid = document.model, document.grid
    if model is None:
        if known["kind"] in ("folder", "gguf"):
            raise RunError(
                f"{folder} profiled a local {known['kind']}; give its path again: roofscope run PATH --resume."
            )
        model = known["id"]
    elif (name := resolve(model).name) != known["id"]:
        raise RunError(f"this run cannot be resumed with {name}: it is one of {known['id']}.")
    interrupted = replace(
        options,
        model=model,
        prompt_lens=grid["prompt_lens"],
        batch_sizes=grid["batch_sizes"],
        context_lens=grid["context_lens"],
        new_tokens=grid["new_tokens"],
        dtype=known["dtype"],
        quant=known["quant"],
        double_quant=known.get("double_quant", False),
        compute_dtype=known.get("compute_dtype", "auto") if known["quant"] in ("nf4", "fp4") else "auto",
        weights=known["weights"],
        engine=",".join(document.engine["names"]),
        attn=known["attention"],
        out=folder,
        fresh=False,
    )
    return replace(prepare(interrupted), resumed=True)


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


def _default_folder(request: ModelRequest) -> Path:
    name = request.source.name.replace("/", "--")
    quant = "" if request.quant == "none" else f"-{request.quant}"
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{dtype_name(request.dtype)}{quant}"
    folder = Path("runs") / stem
    return folder if not folder.exists() else folder.with_name(f"{stem}-{math.floor(time.time() * 1000) % 1000:03d}")
