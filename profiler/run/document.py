"""run.json while a run is measured: before its first measurement, and at its end."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from profiler import __version__
from profiler.device.clock import instrument_s
from profiler.device.device import software
from profiler.facts.ceilings import Ceilings
from profiler.facts.overhead import OverheadSamples, overhead_of, overhead_seconds
from profiler.facts.run_facts import DeviceFacts
from profiler.grid.cells import Cell
from profiler.json_document import view
from profiler.loading.request import dtype_name
from profiler.measure.subject import Subject
from profiler.run.measure import Session
from profiler.run.stages import Stages
from profiler.run.validate import PreparedRun
from profiler.run.warnings import device_warnings, model_warnings
from profiler.store.document import (
    SCHEMA_VERSION,
    CeilingsRecord,
    CountingRecord,
    EngineRecord,
    GridRecord,
    HealthRecord,
    RunDocument,
)


def opening(
    prepared: PreparedRun,
    subject: Subject,
    ceilings: Ceilings,
    overhead: Sequence[OverheadSamples],
    stages: Stages,
    *,
    idle_power_w: float | None,
) -> RunDocument:
    """Return run.json as it is before anything was timed: model, device, software, ceilings, grid and warnings."""
    machine, grid = subject.machine, prepared.grid
    warnings = list(prepared.warnings)
    with stages.optional("the check of device and model", "some warnings may be missing"):
        warnings += device_warnings(machine.info)
        warnings += model_warnings(subject, ceilings)
    health = HealthRecord(idle_power_w=idle_power_w)
    with stages.optional("the device's settings", "they are not stored with the run"):
        health = replace(health, not_seen=machine.source.missing, settings=machine.source.facts())
    clock_s = stages.tried(
        "the overhead of a time mark", "it is not stored with the run", partial(instrument_s, machine.clock)
    )
    info, sheet, dtype = machine.info, machine.info.datasheet, dtype_name(subject.request.dtype)
    by_step = {(item.engine, item.phase, item.batch_size): overhead_of(item) for item in overhead}
    return RunDocument(
        schema_version=SCHEMA_VERSION,
        roofscope=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=prepared.command,
        model=subject.model_facts(grid),
        device=view(
            DeviceFacts,
            info,
            datasheet=sheet.gpu if sheet else None,
            datasheet_flops_per_s=sheet.peak_flops_per_s(dtype) if sheet else None,
            datasheet_bytes_per_s=sheet.bandwidth_bytes_per_s if sheet else None,
        ),
        software=software(),
        ceilings=view(
            CeilingsRecord,
            ceilings,
            full_clock={},
            memory_bytes_per_s=ceilings.memory_bytes_per_s if ceilings.memory else None,
            overhead_s=overhead_seconds(by_step),
        ),
        grid=view(
            GridRecord,
            grid,
            prompts=prepared.prompts.name,
            prompts_digest=prepared.prompts.digest,
            larger=prepared.larger,
        ),
        engine=EngineRecord(
            names=grid.engines,
            budget_s=prepared.options.budget_s,
            instrument_s_per_step=clock_s,
            generate=tuple(name for name, engine in subject.engines.items() if engine.calls_generate),
            replay_as_graph=tuple(name for name, engine in subject.engines.items() if engine.replays_as_graph),
            owned={name: engine.owned for name, engine in subject.engines.items() if engine.owned},
        ),
        counting=CountingRecord(
            coverage=subject.work.coverage,
            unknown=subject.work.unknown,
            paths={f"{engine} {phase}": path for (engine, phase), path in subject.paths.items()},
        ),
        health=health,
        looked_inside=prepared.options.breakdown or prepared.options.trace,
        set_up_warnings=tuple(warnings),
        warnings=tuple(warnings),
    )


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
