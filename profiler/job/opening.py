"""What run.json says of a run before its first figure, and the command that repeats it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from profiler._version import __version__
from profiler.grid import PHASES, Grid
from profiler.loading import ModelRequest, dtype_name
from profiler.machine.clock import clock_for, instrument_s
from profiler.machine.device import software
from profiler.probes.subject import Context
from profiler.record.migrations import SCHEMA_VERSION
from profiler.record.run import RunDocument
from profiler.work.footprint import model_storage_bytes


def opening(
    request: ModelRequest, grid: Grid, context: Context, command: str, budget_s: float, warnings: Sequence[str]
) -> RunDocument:
    """run.json as it is before anything was timed: model, device, software, roofs, grid."""
    loaded, info = context.loaded, context.info
    device = {key: value for key, value in asdict(info).items() if key != "datasheet"}
    device["datasheet"] = info.datasheet.gpu if info.datasheet else None
    if info.datasheet:
        device["datasheet_flops_per_s"] = info.datasheet.peak_flops_per_s(context.dtype)
        device["datasheet_bytes_per_s"] = info.datasheet.bandwidth_bytes_per_s
    ceilings = asdict(context.ceilings)
    ceilings["memory_bytes_per_s"] = context.ceilings.memory_bytes_per_s
    ceilings["dispatch_s"] = {
        name: {
            phase: {
                str(batch): host.step_s
                for (engine, key, batch), host in context.dispatch.items()
                if (engine, key) == (name, phase)
            }
            for phase in PHASES
        }
        for name in grid.engines
    }
    return RunDocument(
        schema_version=SCHEMA_VERSION,
        roofscope=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        model={
            "id": request.source.name,
            "kind": request.source.kind,
            "revision": loaded.revision,
            "architecture": type(loaded.module).__name__,
            "params": context.work.params,
            "dtype": context.dtype,
            "quant": request.quant,
            "double_quant": request.quant_options.double,
            "compute_dtype": dtype_name(request.quant_options.compute_dtype or request.dtype),
            "weights": request.weights,
            "storage_bytes": model_storage_bytes(loaded.module),
            "load_s": loaded.load_s,
            "first_call_s": loaded.first_call_s,
            "unpacked_from": loaded.unpacked_from,
            "attention": context.paths[grid.engines[0], "prefill"].attention,
            "offloaded_bytes": dict(loaded.offloaded_bytes),
            "placement": loaded.placement.as_text() if loaded.placement else None,
        },
        device=device,
        software=software(),
        ceilings=ceilings,
        grid={
            "prompt_lens": list(grid.prompt_lens),
            "batch_sizes": list(grid.batch_sizes),
            "context_lens": list(grid.context_lens),
            "new_tokens": grid.new_tokens,
        },
        engine={
            "names": list(grid.engines),
            "budget_s": budget_s,
            "instrument_s_per_step": instrument_s(clock_for(request.device)),
        },
        counting={
            "coverage": context.work.coverage,
            "unknown": list(context.work.unknown),
            "paths": {f"{engine} {phase}": asdict(path) for (engine, phase), path in context.paths.items()},
        },
        warnings=list(warnings),
    )
