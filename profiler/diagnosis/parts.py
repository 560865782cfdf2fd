"""A cell's time in parts, from the facts of its run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from profiler.diagnosis.facts import Facts, OperatorWork, Replay
from profiler.diagnosis.step_time import Demand, Roofs, Split, split
from profiler.grid import CellKey, Phase
from profiler.timing.outcomes import Visit
from profiler.work.causes import CONVERSIONS, Cause


def model_work(operators: Sequence[OperatorWork]) -> tuple[float, float]:
    """(FLOPs, bytes) that the algorithm needs for a step."""
    return float(sum(item.flops for item in operators)), float(sum(item.model_bytes for item in operators))


def split_of(
    facts: Facts, key: CellKey, latency_s: float, half_width_s: float = 0.0, faults: float = 0.0
) -> tuple[Split, dict[Cause, float]]:
    """The split of a cell's time with so many page faults in it, and the seconds of its avoidable work by cause."""
    replays = facts.replays.get(key, {})
    demands = []
    avoidable_bytes: dict[Cause, float] = {}
    for item in facts.operators[key]:
        alone = replays.get(item.operator)
        demands.append(_demand(facts, item, alone))
        # A replayed kernel has paid for its own operands; what is avoidable around it has not been paid for.
        operands = {} if alone is not None else {Cause.OPERANDS: item.activation_bytes}
        for cause, nbytes in {**operands, **item.avoidable_bytes}.items():
            if cause not in CONVERSIONS:  # which happen inside the replayed module
                avoidable_bytes[cause] = avoidable_bytes.get(cause, 0.0) + float(nbytes)
    roofs = roofs_of(facts, key)
    faults_s = faults * facts.ceilings.page_fault_s
    parts = split(latency_s, demands, sum(avoidable_bytes.values()), roofs, half_width_s, faults_s)
    avoidable_s = {cause: nbytes / roofs.memory_bytes_per_s for cause, nbytes in avoidable_bytes.items()}
    return parts, {**avoidable_s, Cause.PAGE_FAULTS: faults_s}


def roofs_of(facts: Facts, key: CellKey) -> Roofs:
    """The roofs that a cell's step stands under."""
    ceilings = facts.ceilings
    _, working_set_bytes = model_work(facts.operators[key])
    return Roofs(
        memory_bytes_per_s=ceilings.memory_bytes_per_s_for(working_set_bytes),
        dispatch=facts.dispatch.get((key.cell.engine, key.phase, key.cell.batch_size)),
        overlaps=facts.device.overlaps_dispatch,
        memory_half_width=ceilings.memory_half_width,
        compute_half_width=ceilings.compute_half_width(facts.model.dtype),
        fetch_s=sum(nbytes / ceilings.links[where].per_s for where, nbytes in facts.model.offloaded_bytes.items()),
    )


def faults_of(phase: Phase, visits: Sequence[Visit]) -> float:
    """Page faults of a prefill, or of a decode step; a median over visits."""
    if phase == "prefill":
        return statistics.median(visit.prefill_faults for visit in visits)
    return statistics.median(visit.decode_faults / max(1, len(visit.decode_s)) for visit in visits)


def _demand(facts: Facts, item: OperatorWork, alone: Replay | None) -> Demand:
    demand = Demand(
        name=item.operator,
        group=item.group,
        flops=float(item.flops),
        weight_bytes=float(item.weight_bytes),
        kv_bytes=float(item.kv_bytes),
        compute_flops_per_s=facts.ceilings.compute_flops_per_s(item.dtype),
    )
    if alone is None:
        return demand
    whole, conversion = alone.whole.times(item.count), alone.conversion.times(item.count)
    return replace(
        demand,
        replayed_s=whole.median_s,
        replayed_half_width_s=whole.half_width_s,
        dequantise_s=conversion.median_s,
        dequantise_half_width_s=conversion.half_width_s,
    )
