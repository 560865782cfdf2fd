"""The time breakdown of a cell from the facts of its run: its operators' demands and avoidable work."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from profiler.counting.floor import floor_s
from profiler.facts.measurements import Replay
from profiler.facts.operators import COLLECTIVE, OUTSIDE, REST, Cause, OperatorWork
from profiler.facts.roofs import RESIDENT_GAIN
from profiler.facts.run_facts import Facts
from profiler.facts.visits import Visit, phase_medians
from profiler.grid.cells import Cell, CellKey, Phase
from profiler.judge.breakdown import (
    LAYERED,
    Demand,
    StepRoofs,
    TimeBreakdown,
    break_down,
    idle_most,
    idle_share,
    with_engine,
    with_generate,
)
from profiler.stats import Estimate

# Parts that take so much longer alone than the step that holds them were held up by something else.
_HELD_UP_SHARE = 0.10


def total_work(operators: Sequence[OperatorWork]) -> tuple[float, float]:
    """(FLOPs, bytes) that the algorithm needs for a step."""
    return float(sum(item.flops for item in operators)), float(sum(item.model_bytes for item in operators))


def breakdown_of(
    facts: Facts,
    key: CellKey,
    latency_s: float,
    half_width_s: float = 0.0,
    faults: float = 0.0,
    tax: Estimate | None = None,
) -> tuple[TimeBreakdown, dict[Cause, float]]:
    """The split of a cell's time with so many page faults in it, and the seconds of its avoidable work by cause.

    An operator that was run alone has paid for what lies inside its call: nothing of that is counted again among the
    avoidable. Its causes are told all the same, as parts of what its kernel loses.
    """
    replays, roofs = facts.replays.get(key, {}), roofs_of(facts, key)
    demands: list[Demand[float]] = []
    outside_s: dict[Cause, float] = {}
    inside_s: dict[Cause, float] = {}
    padding_s = 0.0
    most = _most_padding(facts, key, roofs, latency_s)
    for item in facts.operators[key]:
        demand = step_demand(facts, item, replays.get(item.operator))
        padded_s = most * _padding_s(item, demand, roofs)
        padding_s += padded_s
        if demand.replayed_s is not None:
            demand = replace(demand, replayed_s=demand.replayed_s - padded_s)
        demands.append(demand)
        seconds = _avoidable_s(item, demand, roofs)
        if demand.replayed_s is None:
            _add(outside_s, seconds)
        else:
            _add(outside_s, {cause: value for cause, value in seconds.items() if cause in OUTSIDE})
            inside = {cause: value for cause, value in seconds.items() if cause not in OUTSIDE}
            lost_s = max(0.0, demand.replayed_s - demand.roof_s(roofs.memory_bytes_per_s))
            share = min(1.0, lost_s / (sum(inside.values()) or 1.0))
            _add(inside_s, {cause: share * value for cause, value in inside.items()})
    faults_s = faults * facts.ceilings.page_fault_s
    if REST in replays:
        demands.append(_small_kernels(replays[REST], demands, outside_s, roofs, faults_s))
    outside_s[Cause.PAGE_FAULTS] = faults_s
    parts = break_down(latency_s, demands, sum(outside_s.values()), roofs, half_width_s, padding_s)
    if tax is not None:
        parts = with_generate(parts, tax.median_s, (tax.high_s - tax.low_s) / 2)
    if key.cell.engine in facts.owning_engines:
        parts = with_engine(parts)
    by_cause = dict(outside_s)
    _add(by_cause, inside_s)
    if padding_s:
        by_cause[Cause.PADDING] = padding_s
    return parts, by_cause


def lost_s(facts: Facts, key: CellKey) -> dict[str, float]:
    """What the kernels of each operator that was run alone take beyond its roof and its conversions."""
    replays, memory = facts.replays.get(key, {}), roofs_of(facts, key).memory_bytes_per_s
    alone = [
        step_demand(facts, item, replays[item.operator]) for item in facts.operators[key] if item.operator in replays
    ]
    return {each.name: (each.replayed_s or 0.0) - each.roof_s(memory) - each.dequantise_s for each in alone}


def as_served(facts: Facts, key: CellKey, latency_s: float) -> Facts:
    """The facts with the roof of the cache, for a step that ended clearly sooner than memory gives its bytes.

    Its working set lies between two sizes of the curve, the smaller in a cache and the larger past it: which of them it
    is like, its time alone tells. Where no cache ends there the step stays above its roof, and its verdict says so.
    """
    _, nbytes = total_work(facts.operators[key])
    of_memory_s = nbytes / facts.ceilings.memory_bytes_per_s_for(nbytes)
    if of_memory_s <= RESIDENT_GAIN * latency_s:
        return facts
    return replace(facts, ceilings=facts.ceilings.out_of_the_cache(nbytes))


def _small_kernels(
    rest: Replay, others: Sequence[Demand[float]], outside_s: dict[Cause, float], roofs: StepRoofs, faults_s: float
) -> Demand[float]:
    """All kernels between the replayed ones, run alone: what they take beyond their traffic, and beyond the fresh pages
    that they fill (`faults_s`, where the replay's own are not off already), is lost to their number or arithmetic.

    Where they take less than was counted (a cache kept what one handed to the next), `outside_s` is cut to that.
    """
    own_s = sum(each.roof_s(roofs.memory_bytes_per_s) for each in others if each.replayed_s is None)
    beyond_s = rest.whole.median_s - own_s
    counted_s = sum(outside_s.values())
    if counted_s > beyond_s:
        for cause in outside_s:
            outside_s[cause] *= max(0.0, beyond_s) / counted_s
    lost_s = max(0.0, beyond_s - counted_s - (0.0 if rest.without_faults else faults_s))
    return Demand(REST, "other", 0.0, 0.0, 0.0, 1.0, lost_s, rest.whole.half_width_s)


def _avoidable_s(item: OperatorWork, demand: Demand[float], roofs: StepRoofs) -> dict[Cause, float]:
    """Seconds of each cause of an operator's avoidable work, by the side of the roofline that binds it."""
    moved = {Cause.OPERANDS: item.activation_bytes, **item.avoidable_bytes}
    copied = {Cause.CACHE_COPIES: roofs.copy_share * roofs.memory_bytes_per_s}
    return {
        cause: floor_s(
            float(item.avoidable_flops.get(cause, 0)),
            float(moved.get(cause, 0)),
            demand.compute_flops_per_s,
            copied.get(cause, roofs.memory_bytes_per_s),
        )
        for cause in {**moved, **item.avoidable_flops}
        if cause is not Cause.PADDING
    }


def _most_padding(facts: Facts, key: CellKey, roofs: StepRoofs, latency_s: float) -> float:
    """What the seconds of padding are cut to, as a share of them: an operator that ran slower alone than it can have
    run in the step tells too much, and padding takes no larger a part of a step than of its operators' roofs."""
    causes = (cause for item in facts.operators[key] for cause in (*item.avoidable_flops, *item.avoidable_bytes))
    if Cause.PADDING not in causes:
        return 1.0
    replays = facts.replays.get(key, {})
    items = [(item, step_demand(facts, item, replays.get(item.operator))) for item in facts.operators[key]]
    told_s = sum(_padding_s(item, demand, roofs) for item, demand in items)
    if not told_s:
        return 1.0
    alone = [(item, replace(demand, replayed_s=None)) for item, demand in items]
    of_roofs_s = sum(_padding_s(item, demand, roofs) for item, demand in alone)
    own_s = sum(demand.roof_s(roofs.memory_bytes_per_s) for _, demand in alone)
    return min(1.0, latency_s * of_roofs_s / (own_s + of_roofs_s) / told_s)


def _padding_s(item: OperatorWork, demand: Demand[float], roofs: StepRoofs) -> float:
    """Seconds that an operator spends on positions which no prompt fills.

    By the operator's own roof, with them and without; where it was run alone, of its time at the padded shape: a kernel
    stays as far below its roof on the one as on the other.
    """
    flops, nbytes = (float(of.get(Cause.PADDING, 0)) for of in (item.avoidable_flops, item.avoidable_bytes))
    if not flops and not nbytes:
        return 0.0
    own_s = demand.roof_s(roofs.memory_bytes_per_s)
    padded = replace(demand, flops=demand.flops + flops, kv_bytes=demand.kv_bytes + nbytes)
    padded_s = padded.roof_s(roofs.memory_bytes_per_s)
    if demand.replayed_s is None:
        return padded_s - own_s
    return demand.replayed_s * (1 - own_s / padded_s)


def _add(total_s: dict[Cause, float], more_s: Mapping[Cause, float]) -> None:
    for cause, seconds in more_s.items():
        total_s[cause] = total_s.get(cause, 0.0) + seconds


def roofs_of(facts: Facts, key: CellKey) -> StepRoofs:
    """The roofs that a cell's step stands under."""
    ceilings = facts.ceilings
    _, working_set_bytes = total_work(facts.operators[key])
    dispatch = facts.dispatch.get((key.cell.engine, key.phase, key.cell.batch_size))
    layered = sum(item.count for item in facts.operators[key] if item.group in LAYERED)
    layers = layered if key.phase == "prefill" else 0
    return StepRoofs(
        memory_bytes_per_s=ceilings.memory_bytes_per_s_for(working_set_bytes),
        dispatch=dispatch,
        overlaps=facts.device.overlaps_dispatch,
        copy_share=ceilings.copy_share,
        memory_half_width=ceilings.memory_half_width,
        compute_half_width=ceilings.compute_half_width(facts.model.dtype),
        measured=ceilings.measured(facts.model.dtype),
        fetch_s=ceilings.fetch_s(facts.model.offloaded_bytes) + exchanged_s(facts, key),
        idle_share=idle_share(layers) if layers else 0.0,
        # Where small kernels were not run alone, what the step takes beyond the others may as well be theirs.
        idle_most=idle_most(layers, bool(dispatch and dispatch.waits)) if REST in facts.replays.get(key, {}) else 0.0,
    )


def exchanged_s(facts: Facts, key: CellKey) -> float:
    """Seconds that the collectives of a step take over the measured link: nothing hides them."""
    link = facts.ceilings.collective
    if link is None:
        return 0.0
    sent = [item for item in facts.operators[key] if item.group == COLLECTIVE]
    return sum(item.count * link.alpha_s + float(item.bus_bytes) / link.bus_bytes_per_s for item in sent)


def faults_of(phase: Phase, visits: Sequence[Visit]) -> float:
    """Page faults of a prefill, or of a decode step; a median over visits."""
    if phase == "prefill":
        return statistics.median(visit.prefill_faults for visit in visits)
    return statistics.median(visit.decode_faults / max(1, len(visit.decode_s)) for visit in visits)


def step_demand(facts: Facts, item: OperatorWork, alone: Replay | None) -> Demand[float]:
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


def held_up(facts: Facts) -> list[Cell]:
    """Measured cells with a step whose parts took clearly longer alone than the whole: something else held them up."""
    found: dict[Cell, None] = {}
    for key in facts.measured:
        medians_s = phase_medians(key.phase, facts.visits[key.cell]).values()
        latency_s = statistics.median(medians_s) if medians_s else math.inf
        if -breakdown_of(facts, key, latency_s)[0].unexplained_s > _HELD_UP_SHARE * latency_s:
            found[key.cell] = None
    return list(found)
