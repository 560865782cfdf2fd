"""The time breakdown of a cell from the facts of its run, the range of its ceilings, and what the GPU's counters
say."""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from profiler.facts.ceilings import AGREE, RESIDENT_GAIN, Ceiling, Ceilings, CeilingsRemeasured, agree, memory_ceiling
from profiler.facts.measurements import Activity, Replay
from profiler.facts.operators import COLLECTIVE, COPIES, OUTSIDE, REST, Cause, OperatorWork
from profiler.facts.overhead import Overhead
from profiler.facts.repetitions import Repetition, median_issue_s, phase_medians
from profiler.facts.run_facts import Facts
from profiler.facts.telemetry import HardwareCounters
from profiler.grid.cells import Cell, CellKey, Phase
from profiler.judge.breakdown import (
    EXCEEDS,
    Demand,
    StepCeilings,
    TimeBreakdown,
    break_down,
    idle_most,
    idle_share,
    is_layer,
    redundant_by_cause_s,
)
from profiler.stats import Estimate

_JOINS = "CatArrayBatchedCopy"
"""torch's kernels of `cat` (aten/src/ATen/native/cuda/Shape.cu)."""
_MATMULS = re.compile("nvjet|gemm|^Kernel2?$")
"""Kernels of matmuls as cuBLAS and CUTLASS call them, without their namespaces."""
_LEAST_MATMULS = 32
"""Matmuls of one step that show a ceiling to be wrong: one in each of the layers of a model of 7 B."""
_LEAST_CEILING_WIDTH = 0.01
"""Half width of a ceiling, as a share, at the least. Samples of one measurement agree within 0.01 % on a GPU, and three
measurements of an H100's memory gave 3.10 to 3.11 TB/s; the model's own matrices are not the streams of the ceiling."""


def total_work(operators: Sequence[OperatorWork]) -> tuple[float, float]:
    """(FLOPs, bytes) that the algorithm needs per step."""
    return float(sum(item.flops for item in operators)), float(sum(item.model_bytes for item in operators))


def working_set_bytes(phase: Phase, operators: Sequence[OperatorWork]) -> float:
    """Bytes that pass a cache between two reads of a weight: what a prefill passes between kernels evicts weights."""
    return float(sum(item.executed_bytes if phase == "prefill" else item.model_bytes for item in operators))


def breakdown_of(
    facts: Facts,
    key: CellKey,
    latency_s: float,
    half_width_s: float = 0.0,
    faults: float = 0.0,
    generate: Estimate | None = None,
) -> tuple[TimeBreakdown, dict[Cause, float]]:
    """The breakdown of a cell's time, and the seconds of its redundant work by cause.

    The time of a replayed operator includes the redundant work inside its call. That work is not part of the redundant
    term; its causes are reported as parts of the kernel's loss. `faults` is the number of page faults in the step, and
    `generate` what `generate` adds to it.
    """
    replays, ceilings = facts.replays.get(key, {}), ceilings_of(facts, key)
    demands: list[Demand[float]] = []
    outside_s: dict[Cause, float] = {}
    inside_s: dict[Cause, float] = {}
    padding_s = 0.0
    items = [(item, step_demand(facts, item, replays.get(item.operator))) for item in facts.operators[key]]
    for (item, demand), padded_s in zip(items, _paddings_s(items, ceilings, latency_s), strict=True):
        padding_s += padded_s
        if demand.replayed_s is not None:
            demand = replace(demand, replayed_s=demand.replayed_s - padded_s)
        demands.append(demand)
        outside, inside = _redundant_s(item, demand, ceilings.memory_bytes_per_s, facts.ceilings.copy_share)
        _add(outside_s, outside)
        _add(inside_s, inside)
    faults_s = faults * facts.ceilings.page_fault_s
    if REST in replays:
        _as_traced(outside_s, facts.activity.get(key))
        demands.append(_small_kernels(replays[REST], demands, outside_s, ceilings, faults_s))
    outside_s[Cause.PAGE_FAULTS] = faults_s
    parts = break_down(latency_s, demands, sum(outside_s.values()), ceilings, half_width_s, padding_s)
    if REST not in replays and facts.device.kind == "cuda" and (traced := facts.activity.get(key)) is not None:
        parts = parts.with_trace(traced.busy_s)
    if generate is not None:
        parts = parts.with_generate(generate.median_s, (generate.high_s - generate.low_s) / 2)
    if key.cell.engine in facts.owning_engines:
        parts = parts.with_engine()
    by_cause = dict(outside_s)
    _add(by_cause, inside_s)
    if padding_s:
        by_cause[Cause.PADDING] = padding_s
    return parts, by_cause


def lost_s(facts: Facts, key: CellKey) -> dict[str, float]:
    """By replayed operator: seconds of its kernels beyond its ceiling and its conversions."""
    replays, memory = facts.replays.get(key, {}), ceilings_of(facts, key).memory_bytes_per_s
    replayed = [item for item in facts.operators[key] if item.operator in replays]
    demands = [step_demand(facts, item, replays[item.operator]) for item in replayed]
    return {each.name: (each.replayed_s or 0.0) - each.ceiling_s(memory) - each.dequantise_s for each in demands}


@dataclass(frozen=True)
class Matmuls:
    """Matmuls of one step in the model's dtype that the compute ceiling limits, as a trace or replays timed them."""

    where: str
    count: int
    flops_per_s: float


def _matmuls_of(facts: Facts, key: CellKey) -> dict[str, tuple[int, float, float]]:
    """By such a matmul: its number, its FLOPs and its seconds in replays, or at its ceiling without one."""
    replays, memory_per_s, found = facts.replays.get(key, {}), facts.ceilings.memory_bytes_per_s, {}
    for item in facts.operators.get(key, ()):
        demand = step_demand(facts, item, replays.get(item.operator))
        if item.weight_bytes and item.dtype == facts.model.dtype and demand.compute_bound(memory_per_s):
            found[item.operator] = (item.count, demand.flops, demand.alone_s(memory_per_s) - demand.dequantise_s)
    return found


def traced_matmuls(facts: Facts, key: CellKey) -> Matmuls | None:
    """The matmuls of a step as its trace has them; None unless all of them are among its longest kernels."""
    longest = facts.activity[key].longest if key in facts.activity else ()
    kernels = [kernel for kernel in longest if _MATMULS.search(kernel.name)]
    matmuls, count = _matmuls_of(facts, key).values(), sum(kernel.calls for kernel in kernels)
    if not count or count != sum(each[0] for each in matmuls):
        return None
    flops, seconds = sum(each[1] for each in matmuls), sum(kernel.seconds for kernel in kernels)
    return Matmuls(f"{key.name} (traced)", count, flops / seconds)


def faster_matmuls(facts: Facts) -> tuple[Matmuls, float] | None:
    """The fastest 32 or more matmuls of one trace or replay that beat the ceiling, and the ceiling; else None."""
    ceiling = facts.ceilings.compute_ceiling(facts.model.dtype)
    ceiling_per_s = ceiling.per_s * (ceiling.at_full_clock if facts.device.kind == "cuda" else 1.0)
    found = [traced_matmuls(facts, key) for key in facts.activity]
    for key in facts.replays:
        fast = [each for each in _matmuls_of(facts, key).values() if each[1] > ceiling_per_s * each[2]]
        count, flops, seconds = (sum(each[index] for each in fast) for index in range(3))
        found.append(Matmuls(f"{key.name} (replayed)", int(count), flops / seconds) if fast else None)
    many = (each for each in found if each is not None and each.count >= _LEAST_MATMULS)
    best = max(many, key=lambda each: each.flops_per_s, default=None)
    return (best, ceiling_per_s) if best is not None and best.flops_per_s > (1 + AGREE) * ceiling_per_s else None


def over_the_run(facts: Facts) -> Facts:
    """The facts with the compute ceiling of the model's dtype as the whole run shows it.

    On a GPU its quartiles are those of all its measurements, since each met another clock. A ceiling that the run's own
    matmuls beat is wrong: their rate takes its place, at full clock on a GPU that reports it. Replays of matmuls may
    run into a power limit that the step's trace did not reach; then they take as long as there.
    """
    dtype, on_gpu = facts.model.dtype, facts.device.kind == "cuda"
    ceiling, found = facts.ceilings.compute.get(dtype), faster_matmuls(facts)
    if ceiling is None or not ceiling.measured:
        return facts
    later = (each.compute[dtype] for each in facts.remeasured_ceilings if on_gpu and dtype in each.compute)
    every = [ceiling, *later]
    ceiling = replace(ceiling, low_per_s=min(x.low_per_s for x in every), high_per_s=max(x.high_per_s for x in every))
    if found is not None:
        per_s = found[0].flops_per_s
        at_clock = on_gpu and ceiling.clock_hz
        ceiling = replace(ceiling, burst_per_s=per_s) if at_clock else ceiling.times(per_s / ceiling.per_s)
    replays = dict(facts.replays)
    for key, replayed in facts.replays.items():
        matmuls, traced = _matmuls_of(facts, key), traced_matmuls(facts, key)
        if traced is not None and matmuls.keys() <= replayed.keys():
            flops, seconds = (sum(each[index] for each in matmuls.values()) for index in (1, 2))
            share = min(1.0, flops / traced.flops_per_s / seconds)
            faster = {name: tuple(share * each for each in replayed[name].seconds) for name in matmuls}
            replays[key] = replayed | {name: replace(replayed[name], seconds=own_s) for name, own_s in faster.items()}
    return replace(
        facts,
        ceilings=replace(facts.ceilings, compute={**facts.ceilings.compute, dtype: ceiling}),
        replays=replays,
    )


def small_kernels_s(facts: Facts, key: CellKey, parts: TimeBreakdown, redundant_s: Mapping[Cause, float]) -> float:
    """At most the seconds of small kernels in a prefill's trace, which other kernels leave; 0 without one."""
    copied_s = sum(seconds for cause, seconds in redundant_s.items() if cause in OUTSIDE)
    large_s = parts.device_s + parts.dequantise_s + sum(max(0.0, seconds) for seconds in lost_s(facts, key).values())
    is_traced = key.phase == "prefill" and key in facts.activity
    return max(0.0, facts.activity[key].busy_s - large_s - copied_s) if is_traced else 0.0


def as_served(facts: Facts, key: CellKey, latency_s: float) -> Facts:
    """The facts with the ceiling of a cache, for a step clearly faster than memory can deliver its bytes.

    Its working set is between two sizes of the bandwidth curve, the smaller inside a cache and the larger beyond it.
    Only the step's time shows which of the two applies. If no cache ends there, the facts are unchanged: the step is
    above its ceiling, and its verdict says so.
    """
    _, nbytes = total_work(facts.operators[key])
    passing_bytes = working_set_bytes(key.phase, facts.operators[key])
    if nbytes / facts.ceilings.memory_bytes_per_s_for(passing_bytes) <= RESIDENT_GAIN * latency_s:
        return facts
    return replace(facts, ceilings=facts.ceilings.out_of_the_cache(passing_bytes))


def _as_traced(outside_s: dict[Cause, float], traced: Activity | None) -> None:
    """Give the copies of a cache, in place, the seconds of the kernels that a trace saw concatenate.

    A rolled window is no contiguous tensor. Its concatenation reached 0.66 of 4.39 TB/s on an H200.
    """
    counted_s = sum(outside_s.get(cause, 0.0) for cause in COPIES)
    traced_s = sum(kernel.seconds for kernel in traced.longest if _JOINS in kernel.name) if traced else 0.0
    for cause in COPIES & set(outside_s):
        outside_s[cause] *= max(1.0, traced_s / counted_s) if counted_s else 1.0


def _small_kernels(
    rest: Replay,
    others: Sequence[Demand[float]],
    outside_s: dict[Cause, float],
    ceilings: StepCeilings,
    faults_s: float,
) -> Demand[float]:
    """The loss of all small kernels, which are replayed together: their time beyond their traffic and page faults.

    If the replay takes less than the counted traffic, because a cache passes data between the kernels, `outside_s` is
    scaled down in place.
    """
    unreplayed_s = sum(each.ceiling_s(ceilings.memory_bytes_per_s) for each in others if each.replayed_s is None)
    beyond_s = rest.whole.median_s - unreplayed_s
    counted_s = sum(outside_s.values())
    if counted_s > beyond_s:
        for cause in outside_s:
            outside_s[cause] *= max(0.0, beyond_s) / counted_s
    lost_s = max(0.0, beyond_s - counted_s - (0.0 if rest.without_faults else faults_s))
    return Demand(REST, "other", 0.0, 0.0, 0.0, 1.0, lost_s, rest.whole.half_width_s)


def _redundant_s(
    item: OperatorWork, demand: Demand[float], memory_bytes_per_s: float, copy_share: float
) -> tuple[dict[Cause, float], dict[Cause, float]]:
    """Seconds of an operator's redundant work by cause: outside of its call, and inside of a replayed one."""
    seconds = redundant_by_cause_s(item, demand.compute_flops_per_s, memory_bytes_per_s, copy_share)
    seconds.pop(Cause.PADDING, None)  # a term of its own
    if demand.replayed_s is None:
        return seconds, {}
    inside = {cause: value for cause, value in seconds.items() if cause not in OUTSIDE}
    beyond_s = max(0.0, demand.replayed_s - demand.ceiling_s(memory_bytes_per_s))
    share = min(1.0, beyond_s / (sum(inside.values()) or 1.0))
    inside.pop(Cause.OPERANDS, None)  # a kernel reads its input and writes its output, however it is fused
    outside = {cause: value for cause, value in seconds.items() if cause in OUTSIDE}
    return outside, {cause: share * value for cause, value in inside.items()}


def _paddings_s(
    items: Sequence[tuple[OperatorWork, Demand[float]]], ceilings: StepCeilings, latency_s: float
) -> list[float]:
    """Seconds of padding of each operator.

    An operator may run slower in isolation than within the step, which overestimates its padding. So all padding takes
    at most the share of the step that it takes of the operators' ceilings.
    """
    paddings_s = [_padding_s(item, demand, ceilings) for item, demand in items]
    if not any(paddings_s):
        return paddings_s
    at_ceilings_s = sum(_padding_s(item, replace(demand, replayed_s=None), ceilings) for item, demand in items)
    useful_s = sum(demand.ceiling_s(ceilings.memory_bytes_per_s) for _, demand in items)
    factor = min(1.0, latency_s * at_ceilings_s / (useful_s + at_ceilings_s) / sum(paddings_s))
    return [factor * padding_s for padding_s in paddings_s]


def _padding_s(item: OperatorWork, demand: Demand[float], ceilings: StepCeilings) -> float:
    """Seconds that padding adds to an operator's ceiling; its kernel is equally far below both ceilings."""
    flops, nbytes = (float(amounts.get(Cause.PADDING, 0)) for amounts in (item.redundant_flops, item.redundant_bytes))
    if not flops and not nbytes:
        return 0.0
    useful_s = demand.ceiling_s(ceilings.memory_bytes_per_s)
    padded = replace(demand, flops=demand.flops + flops, kv_bytes=demand.kv_bytes + nbytes)
    padded_s = padded.ceiling_s(ceilings.memory_bytes_per_s)
    if demand.replayed_s is None:
        return padded_s - useful_s
    return demand.replayed_s * (1 - useful_s / padded_s)


def _add(total_s: dict[Cause, float], more_s: Mapping[Cause, float]) -> None:
    for cause, seconds in more_s.items():
        total_s[cause] = total_s.get(cause, 0.0) + seconds


def overhead_at(facts: Facts, key: CellKey) -> Overhead | None:
    """The overhead of a cell's step; None if it was not measured."""
    return facts.overhead.get((key.cell.engine, key.phase, key.cell.batch_size))


def ceilings_of(facts: Facts, key: CellKey) -> StepCeilings:
    ceilings = facts.ceilings
    overhead, link, exchanged_s = overhead_at(facts, key), ceilings.collective, 0.0
    if link is not None:  # collectives do not overlap other work
        collectives = (item for item in facts.operators[key] if item.group == COLLECTIVE)
        exchanged_s = sum(item.count * link.alpha_s + item.bus_bytes / link.bus_bytes_per_s for item in collectives)
    waits = overhead is not None and overhead.waits
    runs_ahead = key.phase == "decode" and facts.device.hides_overhead and not waits
    in_prefill = facts.operators[key] if key.phase == "prefill" else ()
    layers = sum(item.count for item in in_prefill if is_layer(item.group, item.operator))
    compute = ceilings.compute_ceiling(facts.model.dtype)
    varies = compute.measured and facts.device.hides_overhead
    spread = (compute.high_per_s - compute.low_per_s) / 2 / compute.per_s if varies else 0.0
    return StepCeilings(
        memory_bytes_per_s=ceilings.memory_bytes_per_s_for(working_set_bytes(key.phase, facts.operators[key])),
        overhead=overhead,
        overlaps=facts.device.hides_overhead,
        memory_half_width=max(_LEAST_CEILING_WIDTH, ceilings.memory_ceiling.half_width),
        compute_half_width=max(_LEAST_CEILING_WIDTH, compute.half_width, spread),
        measured=ceilings.measured(facts.model.dtype) and ceilings.beyond_cache,
        issue_s=median_issue_s(facts.repetitions.get(key.cell, ())) if runs_ahead else None,
        fetch_s=ceilings.fetch_s(facts.model.offloaded_bytes) + exchanged_s,
        idle_share=idle_share(layers) if layers else 0.0,
        # Without a replay of the small kernels, the rest of the step may be their time instead of an idle device.
        idle_most=idle_most(layers, waits) if REST in facts.replays.get(key, {}) else 0.0,
    )


def faults_of(phase: Phase, repetitions: Sequence[Repetition]) -> float:
    """Page faults per prefill or per decode step, the median over repetitions."""
    if phase == "prefill":
        return statistics.median(repetition.prefill_faults for repetition in repetitions)
    return statistics.median(repetition.decode_faults / max(1, len(repetition.decode_s)) for repetition in repetitions)


def step_demand(facts: Facts, item: OperatorWork, replay: Replay | None) -> Demand[float]:
    """The demand of an operator in its step, with the times of its replay if there is one."""
    demand = Demand(
        name=item.operator,
        group=item.group,
        flops=float(item.flops),
        weight_bytes=float(item.weight_bytes),
        kv_bytes=float(item.kv_bytes),
        compute_flops_per_s=facts.ceilings.compute_flops_per_s(item.dtype),
    )
    if replay is None:
        return demand
    whole, conversion = replay.whole.times(item.count), replay.conversion.times(item.count)
    return replace(
        demand,
        replayed_s=whole.median_s,
        replayed_half_width_s=whole.half_width_s,
        dequantise_s=conversion.median_s,
        dequantise_half_width_s=conversion.half_width_s,
    )


def cells_of_disturbed_overhead(facts: Facts) -> list[Cell]:
    """Measured cells whose overhead model took clearly longer than whole steps of the model."""
    found = ((key.cell, overhead_at(facts, key)) for key in facts.measured)
    return list(dict.fromkeys(cell for cell, each in found if each and each.disturbed_s > (1 + EXCEEDS) * each.step_s))


def cells_of_disturbed_parts(facts: Facts) -> list[Cell]:
    """Measured cells whose parts, each measured by itself, took clearly longer than the whole step."""

    def parts(key: CellKey) -> TimeBreakdown:
        medians_s = phase_medians(key.phase, facts.repetitions[key.cell]).values()
        return breakdown_of(facts, key, statistics.median(medians_s) if medians_s else math.inf)[0]

    return list(dict.fromkeys(key.cell for key in facts.measured if parts(key).exceeds_step))


TRAFFIC_TOLERANCE = 0.25
"""Share by which counters and counts may differ: the ends of a counted interval are known to 0.1 s, of at least 0.8."""

_LEAST_IN_USE = 0.05
"""Share of the bandwidth from which counters are trusted: those of older runs also saw what came before a loop."""


@dataclass(frozen=True)
class CountedTraffic:
    """The counters of a cell's decode loops, and bytes/s by them and by the counts."""

    counters: HardwareCounters
    bytes_per_s: float
    """By the counters."""
    least_bytes_per_s: float
    """Weights and cache, which come from memory at every step."""
    executed_bytes_per_s: float
    """All operands of all operators; some of them may stay in the L2."""

    @property
    def differs(self) -> bool:
        """Whether the counters contradict the counts; little traffic is not known well enough."""
        if self.counters.dram < _LEAST_IN_USE:
            return False
        least, most = 1 - TRAFFIC_TOLERANCE, 1 + TRAFFIC_TOLERANCE
        return not least * self.least_bytes_per_s <= self.bytes_per_s <= most * self.executed_bytes_per_s


def counted_traffic(facts: Facts, key: CellKey) -> CountedTraffic | None:
    """Return the traffic of a cell's decode loops by both.

    None without counters, without a datasheet's bandwidth, if another process is on the GPU, or if a cache serves the
    step: then its bytes do not come from memory.
    """
    operators, peak = facts.operators.get(key, ()), facts.device.datasheet_bytes_per_s
    counted = [each for each in facts.repetitions.get(key.cell, ()) if each.decode_counters and each.loop_s]
    if key.phase != "decode" or not counted or peak is None or any(each.other_processes for each in facts.readings):
        return None
    least_bytes = float(sum(item.model_bytes for item in operators))
    if facts.ceilings.cache_resident(least_bytes):
        return None
    counters = [repetition.decode_counters for repetition in counted if repetition.decode_counters]
    middle = HardwareCounters(
        *(statistics.median(getattr(each, name) for each in counters) for name in ("sm", "tensor", "dram"))
    )
    steps_per_s = statistics.median(len(repetition.decode_s) / (repetition.loop_s or 1.0) for repetition in counted)
    return CountedTraffic(
        middle,
        bytes_per_s=middle.dram * peak,
        least_bytes_per_s=steps_per_s * least_bytes,
        executed_bytes_per_s=steps_per_s * float(sum(item.executed_bytes for item in operators)),
    )


def extreme_shares(facts: Facts) -> Mapping[str, tuple[float, float]]:
    """The `lowest` and `highest` (memory, compute) ceilings of a run, as shares of the ceilings measured first.

    Pairs of (1, 1) are left out. Memory may be slower for the model's weights than for a stream, and both ceilings may
    have changed until the end of the run.
    """
    ceilings = facts.ceilings
    memory, compute = [1.0, weight_read_share(ceilings)], [1.0]
    for again in facts.remeasured_ceilings:
        for _, unit, first, later in _measured_twice(ceilings, again):
            of_kind = memory if unit == "B/s" else compute
            of_kind.append(_share(later, first))
    sides = {"lowest": (min(memory), min(compute)), "highest": (max(memory), max(compute))}
    return {name: shares for name, shares in sides.items() if shares != (1.0, 1.0)}


def weight_read_share(ceilings: Ceilings) -> float:
    """Read bandwidth of the model's weights over that of a stream in pieces of the same sizes; 1 if the two agree.

    Older runs have no such stream. For them it is the memory ceiling for that number of bytes.
    """
    if (weights := ceilings.weights) is None:
        return 1.0
    stream_per_s, half_width = ceilings.memory_bytes_per_s_for(weights.nbytes), ceilings.memory_ceiling.half_width
    if weights.stream is not None:
        stream_per_s, half_width = weights.stream.per_s, weights.stream.half_width
    own = weights.ceiling
    return 1.0 if agree(own.per_s, stream_per_s, own.half_width + half_width) else own.per_s / stream_per_s


def moved(ceilings: Ceilings, remeasured: CeilingsRemeasured) -> list[tuple[str, str, Ceiling, Ceiling]]:
    """(name, unit, first, later) of each ceiling that differs in a later measurement."""
    twice = _measured_twice(ceilings, remeasured)
    return [(name, unit, first, later) for name, unit, first, later in twice if _share(later, first) != 1.0]


def _measured_twice(ceilings: Ceilings, again: CeilingsRemeasured) -> Iterator[tuple[str, str, Ceiling, Ceiling]]:
    """(name, unit, first, later) of the ceilings of memory and of matmuls."""
    yield "memory", "B/s", memory_ceiling(ceilings.memory), memory_ceiling(again.memory)
    for dtype, later in again.compute.items():
        if dtype in ceilings.compute:
            yield f"{dtype} matmuls", "FLOP/s", ceilings.compute[dtype], later


def _share(later: Ceiling, first: Ceiling) -> float:
    """One ceiling over another of the same kind, at equal clocks if known; 1 if they agree, or one was not measured.

    They agree if the rates do, as measured or at equal clocks. A GPU at its power limit changes its clock within
    milliseconds, and a few readings miss that.
    """
    if not (later.measured and first.measured):
        return 1.0
    clocks = later.clock_hz / first.clock_hz if later.clock_hz and first.clock_hz else 1.0
    if any(agree(later.per_s / clock, first.per_s, later.half_width + first.half_width) for clock in (1.0, clocks)):
        return 1.0
    return later.per_s / clocks / first.per_s
