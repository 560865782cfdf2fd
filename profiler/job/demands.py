"""A cell's row: counted before it is run; once measured, split, placed and judged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from profiler.diagnosis.levers import PAGE_FAULTS, JudgedCell
from profiler.diagnosis.regimes import Measurement, Verdict, judge
from profiler.diagnosis.roofline import place
from profiler.diagnosis.step_time import TERMS, Demand, Roofs, Split, split
from profiler.grid import Cell, Grid, Phase
from profiler.loading import dtype_name
from profiler.probes.kernels import Alone
from profiler.probes.subject import Context, path_of, predicted_peak, step_of
from profiler.record.run import CELL_KEY
from profiler.roofs.values import Ceilings
from profiler.timing.outcomes import Visit, phase_samples
from profiler.timing.sampling import Estimate, NoiseReport, noise_report
from profiler.timing.sweep import TARGET_HALF_WIDTH
from profiler.work.formats import CONVERSIONS
from profiler.work.operators import Operator
from profiler.work.step import ExecutionPath, Step


@dataclass(frozen=True)
class Beside:
    """What other cells and the device's own reports say about a cell."""

    graph_step_s: float | None = None
    batch_side: str = ""
    depth_side: str = ""
    sm_active: float | None = None
    memory_active: float | None = None
    power_capped: bool = False


def _demand(operator: Operator, step: Step, path: ExecutionPath, ceilings: Ceilings, alone: Alone | None) -> Demand:
    work = operator.work(step, path)
    return Demand(
        name=operator.name,
        group=operator.group,
        flops=float(work.model_flops),
        weight_bytes=float(work.weight_bytes + work.embedding_bytes + work.logits_bytes),
        kv_bytes=float(work.kv_read_bytes + work.kv_write_bytes),
        compute_flops_per_s=ceilings.compute_flops_per_s(dtype_name(operator.dtype)),
        **_as_replayed(alone),
    )


def _as_replayed(alone: Alone | None) -> dict[str, float]:
    if alone is None:
        return {}
    return {
        "replayed_s": alone.whole.median_s,
        "replayed_half_width_s": alone.whole.half_width_s,
        "dequantise_s": alone.conversion.median_s,
        "dequantise_half_width_s": alone.conversion.half_width_s,
    }


def expected_visit_s(context: Context, grid: Grid) -> dict[Cell, float]:
    """The floor of a whole visit of each cell, used to tell the time left before any was measured."""
    expected = {}
    for cell in grid.cells:
        total = 0.0
        times: dict[Phase, int] = {"prefill": 2, "decode": grid.decode_steps}
        for phase in cell.phases:
            total += times[phase] * _split(context, phase, cell, grid, latency_s=1.0, replayed={})[0].floor_s
        expected[cell] = total
    return expected


def _split(
    context: Context,
    phase: Phase,
    cell: Cell,
    grid: Grid,
    latency_s: float,
    replayed: Mapping[Operator, Alone],
    latency_half_width_s: float = 0.0,
    faults: float = 0.0,
) -> tuple[Split, dict[str, float]]:
    """The split of a cell's time with so many page `faults` in it, and the seconds of its avoidable work by cause."""
    step, path = step_of(phase, cell, grid), path_of(context, phase, cell, grid)
    demands = []
    avoidable_bytes: dict[str, float] = {}
    for operator in context.work.operators:
        alone = replayed.get(operator)
        demands.append(_demand(operator, step, path, context.ceilings, alone))
        work = operator.work(step, path)
        # A replayed kernel has paid for its own operands; what is avoidable around it has not been paid for.
        operands = {} if alone is not None else {"operands": work.activation_bytes}
        for cause, nbytes in {**operands, **work.avoidable_bytes}.items():
            if cause not in CONVERSIONS:  # which happen inside the replayed module
                avoidable_bytes[cause] = avoidable_bytes.get(cause, 0.0) + float(nbytes)
    working_set = float(context.work.work(step, path).model_bytes)
    roofs = _roofs(context, phase, cell, working_set)
    faults_s = faults * context.ceilings.page_fault_s
    parts = split(latency_s, demands, sum(avoidable_bytes.values()), roofs, latency_half_width_s, faults_s)
    avoidable_s = {cause: nbytes / roofs.memory_bytes_per_s for cause, nbytes in avoidable_bytes.items()}
    return parts, {**avoidable_s, PAGE_FAULTS: faults_s}


def _roofs(context: Context, phase: Phase, cell: Cell, working_set_bytes: float) -> Roofs:
    links = context.ceilings.links
    return Roofs(
        memory_bytes_per_s=context.ceilings.memory_bytes_per_s_for(working_set_bytes),
        dispatch=context.dispatch.get((cell.engine, phase, cell.batch_size)),
        overlaps=context.info.overlaps_dispatch,
        memory_half_width=context.ceilings.memory_half_width,
        compute_half_width=context.ceilings.compute_half_width(context.dtype),
        fetch_s=sum(nbytes / links[where].per_s for where, nbytes in context.loaded.offloaded_bytes.items()),
    )


def noise_of(
    phase: Phase, visits: Sequence[Visit], throttled: Sequence[str], machine_drift: float, sigma: float
) -> NoiseReport:
    busy = [(visit.foreign_cores, visit.wall_s) for visit in visits if visit.foreign_cores is not None]
    foreign = sum(cores * wall_s for cores, wall_s in busy) / sum(wall_s for _, wall_s in busy) if busy else None
    return noise_report(
        phase_samples(phase, visits),
        foreign_cores=foreign,
        throttled=throttled,
        machine_drift=machine_drift,
        visit_sigma=sigma,
    )


def _faults(phase: Phase, visits: Sequence[Visit]) -> float:
    """Page faults of a prefill, or of a decode step; a median over visits."""
    if phase == "prefill":
        return statistics.median(visit.prefill_faults for visit in visits)
    return statistics.median(visit.decode_faults / max(1, len(visit.decode_s)) for visit in visits)


def counted_row(context: Context, phase: Phase, cell: Cell, grid: Grid) -> dict[str, Any]:
    step = step_of(phase, cell, grid)
    work = context.work.work(step, path_of(context, phase, cell, grid))
    return {
        "phase": phase,
        "batch_size": cell.batch_size,
        "prompt_len": cell.prompt_len,
        "context_len": int(step.context),
        "new_tokens": grid.new_tokens,
        "engine": cell.engine,
        "model_flops": int(work.model_flops),
        "model_bytes": round(float(work.model_bytes)),
        "executed_flops": int(work.executed_flops),
        "executed_bytes": round(float(work.executed_bytes)),
        "intensity": float(work.intensity),
    }


def measured_row(
    context: Context,
    phase: Phase,
    cell: Cell,
    grid: Grid,
    visits: Sequence[Visit],
    time_s: Estimate,
    replayed: Mapping[Operator, Alone],
    noise: NoiseReport,
    beside: Beside,
) -> tuple[dict[str, Any], Verdict, JudgedCell]:
    p90_s, p99_s = np.percentile(np.concatenate(phase_samples(phase, visits)), [90, 99])
    step = step_of(phase, cell, grid)
    work = context.work.work(step, path_of(context, phase, cell, grid))
    sheet = context.info.datasheet
    placement = place(
        time_s.median_s,
        float(work.model_flops),
        float(work.model_bytes),
        sheet.peak_flops_per_s(context.dtype) if sheet else None,
        sheet.bandwidth_bytes_per_s if sheet else None,
    )
    half_width_s = (time_s.high_s - time_s.low_s) / 2
    faults = _faults(phase, visits)
    parts, avoidable_s = _split(context, phase, cell, grid, time_s.median_s, replayed, half_width_s, faults)
    user_facing = _user_facing(phase, cell, grid, visits)
    verdict = judge(
        Measurement(
            split=parts,
            model_flops=float(work.model_flops),
            model_bytes=float(work.model_bytes),
            compute_flops_per_s=context.ceilings.compute_flops_per_s(context.dtype),
            roofs=_roofs(context, phase, cell, float(work.model_bytes)),
            latency_low_s=time_s.low_s,
            latency_high_s=time_s.high_s,
            noise=noise.grade,
            offloaded=context.loaded.offloaded,
            cache_resident=context.ceilings.cache_resident(float(work.model_bytes)),
            issue_s=user_facing.get("issue_s") if context.info.overlaps_dispatch else None,
            **asdict(beside),
        )
    )
    tokens = float(step.tokens)
    peaks = [visit.peak_memory_bytes for visit in visits if visit.peak_memory_bytes is not None]
    row: dict[str, Any] = {
        "status": "ok",
        "latency_s": time_s.median_s,
        "latency_low_s": time_s.low_s,
        "latency_high_s": time_s.high_s,
        "samples": time_s.samples,
        "tokens_per_s": tokens / time_s.median_s,
        "tokens_per_s_per_seq": tokens / cell.batch_size / time_s.median_s,
        "flops_per_s": placement.flops_per_s,
        "bytes_per_s": placement.bytes_per_s,
        "mfu": math.nan if placement.mfu is None else placement.mfu,
        "mbu": math.nan if placement.mbu is None else placement.mbu,
        "attained": parts.attained,
        "floor_s": parts.floor_s,
        **{name: getattr(parts, name) for name in TERMS},
        "regime": verdict.regime,
        "confidence": verdict.confidence,
        "peak_memory_bytes": max(peaks) if peaks else None,
        "noise": noise.grade,
        "p90_s": float(p90_s),
        "p99_s": float(p99_s),
        "stopped": "interval" if time_s.half_width <= TARGET_HALF_WIDTH else "budget",
        **user_facing,
    }
    judged = JudgedCell(
        phase=phase,
        batch_size=cell.batch_size,
        depth=cell.depth,
        engine=cell.engine,
        tokens_per_s=row["tokens_per_s"],
        flops_per_s=placement.flops_per_s,
        bytes_per_s=placement.bytes_per_s,
        split=parts,
        verdict=verdict,
        rows=int(step.batch * step.query),
        memory_bytes=float(predicted_peak(context, cell, grid)),
        avoidable_s=avoidable_s,
    )
    return row, verdict, judged


def _user_facing(phase: Phase, cell: Cell, grid: Grid, visits: Sequence[Visit]) -> dict[str, Any]:
    """Medians over the visits of what belongs to one phase alone; NaN where it was not measured."""

    def median(values: Sequence[float | None]) -> float:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else math.nan

    found = {"device_memory_bytes": median([visit.device_memory_bytes for visit in visits])}
    if phase == "prefill":
        return {**found, "ttft_s": median([visit.ttft_s for visit in visits])}
    generated = cell.batch_size * grid.new_tokens
    energy_j = [None if visit.energy_j is None else visit.energy_j / generated for visit in visits]
    return {
        **found,
        "first_step_s": median([visit.decode_s[0] for visit in visits]),
        "issue_s": median([None if v.issue_s is None else v.issue_s / len(v.decode_s) for v in visits]),
        "joules_per_token": median(energy_j),
    }


def evidence_record(row: Mapping[str, Any], verdict: Verdict) -> dict[str, Any]:
    return {
        **{name: row[name] for name in CELL_KEY},
        "regime": verdict.regime,
        "confidence": verdict.confidence,
        "flags": list(verdict.flags),
        "signals": [asdict(item) for item in verdict.evidence],
        "conflicts": [item.signal for item in verdict.conflicts],
    }
