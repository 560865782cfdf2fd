"""The run.json that is written before the first measurement: model, device, software, grid, execution paths."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime

from profiler._version import __version__
from profiler.device.device import Device, software
from profiler.facts.dispatch import DispatchSamples, dispatch_of, dispatch_seconds
from profiler.facts.roofs import Ceilings
from profiler.facts.run_facts import DeviceFacts
from profiler.loading.request import dtype_name
from profiler.measure.subject import Subject
from profiler.run.validate import PreparedRun
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
    dispatch: Sequence[DispatchSamples],
    health: HealthRecord,
    warnings: Sequence[str],
    instrument_s_per_step: float | None,
) -> RunDocument:
    """Return run.json as it is before anything was timed: model, device, software, roofs, grid."""
    grid = prepared.grid
    return RunDocument(
        schema_version=SCHEMA_VERSION,
        roofscope=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=prepared.command,
        model=subject.model_facts(grid),
        device=device_facts(subject.machine.info, dtype_name(subject.request.dtype)),
        software=software(),
        ceilings=ceilings_record(ceilings, dispatch),
        grid=GridRecord(grid.prompt_lens, grid.batch_sizes, grid.context_lens, grid.new_tokens, grid.ragged),
        engine=EngineRecord(
            names=grid.engines,
            budget_s=prepared.options.budget_s,
            instrument_s_per_step=instrument_s_per_step,
            generate=tuple(name for name, engine in subject.engines.items() if engine.taxes),
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


def device_facts(info: Device, dtype: str) -> DeviceFacts:
    """Return a device's entry in run.json, with its datasheet's dense peak for `dtype`."""
    sheet = info.datasheet
    return DeviceFacts(
        kind=info.kind,
        name=info.name,
        memory_bytes=info.memory_bytes,
        last_level_cache_bytes=info.last_level_cache_bytes,
        threads=info.threads,
        compute_capability=info.compute_capability,
        datasheet=sheet.gpu if sheet else None,
        datasheet_flops_per_s=sheet.peak_flops_per_s(dtype) if sheet else None,
        datasheet_bytes_per_s=sheet.bandwidth_bytes_per_s if sheet else None,
    )


def ceilings_record(ceilings: Ceilings, dispatch: Sequence[DispatchSamples]) -> CeilingsRecord:
    """Return the entry of the roofs in run.json, with the dispatch time per engine, phase and batch size."""
    by_step = {(item.engine, item.phase, item.batch_size): dispatch_of(item) for item in dispatch}
    return CeilingsRecord(
        **{item.name: getattr(ceilings, item.name) for item in fields(ceilings)},
        memory_bytes_per_s=ceilings.memory_bytes_per_s if ceilings.memory else None,
        dispatch_s=dispatch_seconds(by_step),
    )


def config_of(prepared: PreparedRun) -> dict[str, object]:
    """Return the model's config without the path that it was read from."""
    config: dict[str, object] = copy.deepcopy(prepared.config).to_dict()
    config.pop("_name_or_path", None)
    return config
