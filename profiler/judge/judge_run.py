"""Judge a run from its facts: rows, evidence, doubling tests, engine differences and the answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from profiler.facts.ceilings import AGREE, drift, swing
from profiler.facts.measurements import NotTried
from profiler.facts.operators import REST, Cause
from profiler.facts.repetitions import first_use_s, foreign_cores, phase_samples, repetition_spreads
from profiler.facts.run_facts import Facts
from profiler.facts.telemetry import POWER_CAP, ActiveShares
from profiler.grid.cells import CellKey
from profiler.judge.answer import NO_ANSWER, Answer, answer_of
from profiler.judge.breakdown import TERMS
from profiler.judge.cells import (
    CellEvidence,
    CellResult,
    EngineDifference,
    JudgedCell,
    columns_of,
    timed_row,
    trial_results,
    with_repetitions,
)
from profiler.judge.changes import Setting, changes
from profiler.judge.demand import (
    as_served,
    breakdown_of,
    ceilings_of,
    counted_traffic,
    extreme_shares,
    faults_of,
    lost_s,
    over_the_run,
    small_kernels_s,
    total_work,
    traced_matmuls,
)
from profiler.judge.engine_differences import (
    GenerateOverhead,
    engine_differences,
    generate_overhead,
    generate_overheads,
)
from profiler.judge.machine_speed import at_median_speed, busy_sentences
from profiler.judge.module_times import unexplained_by_group
from profiler.judge.padding import RaggedStep, ragged_step, with_ragged
from profiler.judge.regimes import THROTTLED, Measurement, holds_over_interval, judge_cell, within_ceiling_range
from profiler.judge.scaling import SIZE_OF, BoundSide, DoublingTest, Series, doubling_tests, series_of
from profiler.loading.changes import Circumstances
from profiler.stats import Estimate, NoiseReport, estimate, narrow_enough, noise_report, undisturbed

_SIXTEEN_BIT = ("bfloat16", "float16")
# The unexplained share of a step above which it is measured by operator group.
_UNEXPLAINED_SHARE = 0.20


@dataclass(frozen=True)
class Timed:
    """The times of a run's cells, from facts at the machine's median speed."""

    facts: Facts
    times: Mapping[CellKey, Estimate]
    """By measured cell."""
    steady: Mapping[CellKey, Estimate]
    """The same without the term of the machine's drift, which changes cells alike that are timed in turn."""
    rows: Mapping[CellKey, CellResult]
    """By cell: its counted work, and its measured or forecast time."""


@dataclass(frozen=True)
class BrokenDown:
    """Where the times of a run's cells go, and the limit of each cell."""

    timed: Timed
    rows: Mapping[CellKey, CellResult]
    """As they are in cells.csv."""
    cells: Mapping[CellKey, _CellJudgement]
    """By measured cell; empty without both ceilings."""
    tests: tuple[DoublingTest, ...]

    @property
    def unexplained(self) -> list[CellKey]:
        """Cells of which more than a fifth of the time is unexplained, the worst first."""
        cells = filter(_is_unexplained, (item.cell for item in self.cells.values()))
        return [cell.key for cell in sorted(cells, key=lambda cell: -cell.split.unexplained_s / cell.split.latency_s)]


@dataclass(frozen=True)
class Judgement:
    """The results that follow from the facts of a run."""

    cells: tuple[CellResult, ...]
    differences: tuple[EngineDifference, ...]
    scaling: tuple[DoublingTest, ...]
    generate: tuple[GenerateOverhead, ...]
    ragged: tuple[RaggedStep, ...]
    evidence: tuple[CellEvidence, ...] = ()
    judged: tuple[JudgedCell, ...] = ()
    answer: Answer = NO_ANSWER


def judge_run(facts: Facts) -> Judgement:
    """Judge every cell of a run, and compare cells with each other."""
    return advise_run(break_down_run(time_run(facts)))


def time_run(facts: Facts, keys: Sequence[CellKey] | None = None) -> Timed:
    """The time of every cell, or of these `keys`, with its interval."""
    facts, _ = at_median_speed(facts)
    spreads = repetition_spreads(
        facts.measured, facts.repetitions, swing(facts.drift_readings, on_gpu=facts.device.kind == "cuda")
    )
    keys = facts.grid.keys if keys is None else keys
    samples = {
        key: phase_samples(key.phase, facts.repetitions[key.cell]) for key in keys if facts.repetitions.get(key.cell)
    }
    times = {key: estimate(of_key, spreads[key.phase]) for key, of_key in samples.items()}
    steady = {key: estimate(of_key, replace(spreads[key.phase], drift=0.0)) for key, of_key in samples.items()}
    return Timed(facts, times, steady, {key: timed_row(facts, key, times.get(key)) for key in keys})


def break_down_run(timed: Timed) -> BrokenDown:
    """The terms and the limit of each time. Without both ceilings there are none, and only rates are added."""
    timed = replace(timed, facts=over_the_run(timed.facts))
    facts, rows = timed.facts, timed.rows
    if not facts.ceilings.judges:
        return BrokenDown(timed, {**rows, **{key: _time_row(timed, key) for key in timed.times}}, {}, ())
    drifted = drift(facts.drift_readings, on_gpu=facts.device.kind == "cuda")
    compared = [timed_row(facts, key, timed.steady.get(key)) for key in rows]
    tests = doubling_tests(compared, facts.operators, facts.ceilings, drifted)
    sides = {test.series: test.sides for test in tests}
    cells = {key: _judge(timed, key, _sides(rows[key], sides)) for key in timed.times}
    return BrokenDown(timed, {**rows, **{key: item.row for key, item in cells.items()}}, cells, tuple(tests))


def advise_run(broken: BrokenDown) -> Judgement:
    """The differences between engines, what would save time in each cell, and the answer in sentences."""
    facts, steady, cells = broken.timed.facts, broken.timed.steady, broken.cells
    differences = engine_differences(facts, steady, {key: item.cell for key, item in cells.items()})
    found = Judgement(
        cells=tuple(broken.rows.values()),
        scaling=broken.tests,
        differences=tuple(differences),
        generate=tuple(generate_overheads(facts, steady)),
        ragged=tuple(item.ragged for item in cells.values() if item.ragged),
    )
    if not cells:
        return found
    judged, busy = [item.cell for item in cells.values()], busy_sentences(facts)
    setting = replace(setting_of(facts), busy=bool(busy))
    every = [
        replace(
            cell,
            engines=_engines_on(cell.key, differences, facts),
        )
        for cell in judged
    ]
    every = [replace(cell, changes=tuple(changes(cell, setting))) for cell in every]
    return replace(
        found,
        evidence=tuple(_evidence(facts, item.noise, cell) for item, cell in zip(cells.values(), every, strict=True)),
        judged=tuple(every),
        answer=answer_of(every, setting, differences, busy, _cut(facts)),
    )


def _time_row(timed: Timed, key: CellKey) -> CellResult:
    facts, time_s = timed.facts, timed.times[key]
    spans = [span for repetition in facts.repetitions[key.cell] for span in repetition.spans(key.phase)]
    clock_share = _clock_share(facts, key, facts.timeline.active(spans))
    slowed = facts.timeline.throttled(spans, key.phase)
    return _rated_row(timed, key, _noise(facts, key, slowed, clock_share, time_s))


def _rated_row(timed: Timed, key: CellKey, noise: NoiseReport) -> CellResult:
    """A row with its repetitions, its rates, their shares of the datasheet's peaks, and its noise.

    Rates are model work over time, so redundant work does not raise them. MFU is that of PaLM (arXiv:2204.02311).
    """
    facts, row, time_s = timed.facts, timed.rows[key], timed.times[key]
    flops_per_s, bytes_per_s = (amount / time_s.median_s for amount in total_work(facts.operators[key]))
    peak, bandwidth = facts.device.datasheet_flops_per_s, facts.device.datasheet_bytes_per_s
    return replace(
        with_repetitions(row, key, facts.repetitions[key.cell]),
        flops_per_s=flops_per_s,
        bytes_per_s=bytes_per_s,
        mfu=flops_per_s / peak if peak else math.nan,
        mbu=bytes_per_s / bandwidth if bandwidth else math.nan,
        noise=noise.grade,
        stopped="interval" if narrow_enough(time_s, row.repetitions or 0) else "budget",
    )


def _cut(facts: Facts) -> list[NotTried]:
    """The changes for whose trials there was no time, also later in the run."""
    tried = {trial.line for trials in facts.trials.values() for trial in trials}
    return [item for item in {each.line: each for each in facts.every(NotTried)}.values() if item.line not in tried]


def setting_of(facts: Facts) -> Setting:
    """The properties of the device and the model on which advice depends."""
    model, device, ceilings = facts.model, facts.device, facts.ceilings
    sixteen_bit = {name: ceilings.compute[name].per_s for name in _SIXTEEN_BIT if name in ceilings.compute}
    fastest = max(sixteen_bit, key=lambda name: sixteen_bit[name], default=None)
    is_wide, ceiling = model.dtype == "float32", ceilings.compute_ceiling(model.dtype)
    return Setting(
        memory_bytes_per_s=ceilings.memory_bytes_per_s,
        compute_flops_per_s=ceilings.compute_flops_per_s(model.dtype),
        weight_bits=8 * model.linear_bytes / model.linear_weights if model.linear_weights else 16.0,
        here=circumstances_of(facts),
        measured=ceilings.measured(model.dtype),
        weights=float(model.linear_weights),
        cache_bits=8.0 * model.cache_itemsize,
        four_bit_dense_from_rows=model.four_bit_dense_from_rows,
        sixteen_bit_flops_per_s=sixteen_bit[fastest] if is_wide and fastest else None,
        sixteen_bit_dtype=fastest or _SIXTEEN_BIT[0] if is_wide else model.dtype,
        sustained_flops_per_s=(ceiling.low_per_s, ceiling.high_per_s)
        if device.kind == "cuda" and ceiling.measured
        else (),
    )


def circumstances_of(facts: Facts) -> Circumstances:
    """What decides which changes work, as far as facts say: not which packages are installed."""
    model, device = facts.model, facts.device
    cores = [work for works in facts.operators.values() for work in works if work.group == "attention"]
    unfused = any(work.redundant_bytes.get(Cause.ATTENTION_MATRIX) for work in cores)
    return Circumstances(
        on_gpu=device.kind == "cuda",
        dtype=model.dtype,
        quant=model.quant,
        capability=float(device.compute_capability or 0) if device.kind == "cuda" else 0.0,
        attention=model.attention,
        kernel="math" if unfused else "",
        grouped_heads=unfused,
        windowed=any(work.redundant_bytes.get(Cause.ROLLED_WINDOWS) for work in cores),
        experts=model.experts,
        threads=device.threads,
        layers=max((work.count for work in cores), default=0),
        packs=model.kind != "gguf",
    )


def _is_unexplained(cell: JudgedCell) -> bool:
    return cell.split.unexplained_s > _UNEXPLAINED_SHARE * cell.split.latency_s


def _at_clock(facts: Facts, clock_share: float) -> Facts:
    """The facts with the compute ceilings scaled to a share of the clock at which they were measured."""
    return facts if clock_share == 1.0 else replace(facts, ceilings=facts.ceilings.times(1.0, clock_share))


@dataclass(frozen=True, slots=True)
class _CellJudgement:
    row: CellResult
    noise: NoiseReport
    cell: JudgedCell
    ragged: RaggedStep | None


def _judge(timed: Timed, key: CellKey, sides: Mapping[str, str]) -> _CellJudgement:
    """Break down and judge a cell's time, with the compute ceiling at the GPU's clock during its repetitions."""
    facts, time_s = timed.facts, timed.times[key]
    repetitions, shares, (flops, nbytes) = (
        facts.repetitions[key.cell],
        extreme_shares(facts),
        total_work(facts.operators[key]),
    )
    spans = [span for repetition in repetitions for span in repetition.spans(key.phase)]
    activity, slowed = facts.timeline.active(spans), facts.timeline.throttled(spans, key.phase)
    clock_share = _clock_share(facts, key, activity)
    if clock_share < 1.0 and _is_faster_than_clock(facts, key, time_s.median_s, clock_share):
        clock_share = 1.0
    noise = _noise(facts, key, slowed, clock_share, time_s)
    facts = as_served(_at_clock(facts, clock_share), key, time_s.median_s)
    half_width_s = (time_s.high_s - time_s.low_s) / 2
    faults, tax = faults_of(key.phase, repetitions), generate_overhead(facts, key, timed.steady)

    def under(facts: Facts) -> tuple[Measurement, Mapping[Cause, float]]:
        """The input of a verdict under the ceilings of `facts`, and the seconds of redundant work by cause."""
        split, redundant_s = breakdown_of(facts, key, time_s.median_s, half_width_s, faults, tax)
        measurement = Measurement(
            split=split,
            model_flops=flops,
            model_bytes=nbytes,
            compute_flops_per_s=facts.ceilings.compute_flops_per_s(facts.model.dtype),
            ceilings=ceilings_of(facts, key),
            latency_low_s=time_s.low_s,
            latency_high_s=time_s.high_s,
            noise=noise.grade,
            offloaded=facts.model.offloaded,
            cache_resident=facts.ceilings.cache_resident(nbytes),
            graph_step_s=_graph_step_s(facts, key, split.latency_s),
            batch_side=sides.get("batch", ""),
            depth_side=sides.get("prompt" if key.phase == "prefill" else "context", ""),
            sm_active=activity.sm,
            memory_active=activity.memory,
            traffic=counted_traffic(facts, key),
            power_capped=POWER_CAP in slowed,
            clock_share=clock_share,
        )
        return measurement, redundant_s

    measurement, redundant_s = under(facts)
    scaled = {name: replace(facts, ceilings=facts.ceilings.times(*pair)) for name, pair in shares.items()}
    extremes = {name: judge_cell(under(each)[0]) for name, each in scaled.items()}
    verdict, parts, ceilings = (
        within_ceiling_range(judge_cell(measurement), extremes),
        measurement.split,
        measurement.ceilings,
    )
    if noise.grade == "unusable" and holds_over_interval(measurement, verdict.regime):
        noise = replace(noise, grade="noisy")  # a wide interval whose conclusion is certain
    rated, ragged = _rated_row(timed, key, noise), ragged_step(facts, key, parts, timed.steady)
    lost = lost_s(facts, key)
    judged = JudgedCell(
        key=key,
        tokens_per_s=rated.tokens_per_s,
        flops_per_s=rated.flops_per_s,
        bytes_per_s=rated.bytes_per_s,
        ceiling_bytes_per_s=ceilings.memory_bytes_per_s,
        ceiling_flops_per_s=_ceiling_flops_per_s(facts, key),
        split=parts,
        verdict=verdict,
        operators=facts.operators[key],
        memory_bytes=float(facts.predicted_peak_bytes[key.cell]),
        redundant_s=redundant_s,
        lost_s=lost,
        small_kernels_s=max(0.0, parts.kernel_s - sum(lost.values())) if REST in facts.replays.get(key, {}) else None,
        traced_small_s=small_kernels_s(facts, key, parts, redundant_s),
        host_pace_s=(ceilings.overhead_s or 0.0) if ceilings.overlaps else 0.0,
        host_least_s=min(ceilings.overhead.least_s, ceilings.overhead.step_s) if ceilings.overhead else 0.0,
        longest=facts.activity[key].longest if key in facts.activity else (),
        waits=ceilings.overhead is not None and ceilings.overhead.waits,
        graph_step_s=measurement.graph_step_s,
        clock_share=clock_share,
        first_use_s=first_use_s(repetitions) if key.phase == "decode" else None,
        undisturbed_s=min(
            undisturbed(samples).quartile_s for samples in phase_samples(key.phase, repetitions) if samples
        ),
        tried=tuple(trial_results(facts.trials.get(key, ()))),
        spread=half_width_s / time_s.median_s,
        usable=noise.grade != "unusable",
    )
    judged_row = replace(
        with_ragged(rated, ragged),
        attained=parts.attained,
        floor_s=parts.floor_s,
        **{term: getattr(parts, term) for term in TERMS},
        regime=verdict.regime,
        confidence=verdict.confidence,
    )
    return _CellJudgement(judged_row, noise, judged, ragged)


def _evidence(facts: Facts, noise: NoiseReport, cell: JudgedCell) -> CellEvidence:
    """The evidence of a cell's verdict."""
    verdict, latency_s, unexplained_s = cell.verdict, cell.split.latency_s, dict[str, float]()
    if _is_unexplained(cell):
        unexplained_s = unexplained_by_group(_at_clock(facts, cell.clock_share), cell.key, latency_s)
    return CellEvidence(
        **columns_of(cell.key),
        regime=verdict.regime,
        confidence=verdict.confidence,
        flags=verdict.flags,
        signals=verdict.evidence,
        conflicts=tuple(item.signal for item in verdict.conflicts),
        split_half_widths_s=cell.split.half_widths_s,
        noise_reasons=noise.reasons,
        predicted_peak_memory_bytes=facts.predicted_peak_bytes[cell.key.cell],
        changes=cell.changes,
        first_use_s=cell.first_use_s,
        unexplained_in_s=unexplained_s,
    )


def _ceiling_flops_per_s(facts: Facts, key: CellKey) -> float:
    """FLOP/s of a step in which every matmul is at the ceiling of its dtype."""
    flops, _ = total_work(facts.operators[key])
    ceiling_s = sum(float(item.flops) / facts.ceilings.compute_flops_per_s(item.dtype) for item in facts.operators[key])
    return flops / ceiling_s if ceiling_s else facts.ceilings.compute_flops_per_s(facts.model.dtype)


def _clock_share(facts: Facts, key: CellKey, activity: ActiveShares) -> float:
    """The GPU's clock during a cell over that of its compute ceiling; 1 if one is unknown, or on a CPU.

    A short prefill runs at the full clock, and the ceiling was measured at the power limit. The share is at most that
    of the burst. Clocks are read ten times a second: matmuls that a trace saw run faster show a higher one.
    """
    ceiling = facts.ceilings.compute_ceiling(facts.model.dtype)
    if facts.device.kind != "cuda" or not ceiling.clock_hz or not activity.clock_hz:
        return 1.0
    traced = traced_matmuls(facts, key)
    own = traced.flops_per_s / ceiling.per_s if traced is not None else 0.0
    return min(ceiling.at_full_clock, max(own, activity.clock_hz / ceiling.clock_hz))


def _is_faster_than_clock(facts: Facts, key: CellKey, latency_s: float, clock_share: float) -> bool:
    """Whether a step is faster than this clock allows, but not than the whole clock: then the reading is wrong."""
    slow, whole = (breakdown_of(_at_clock(facts, share), key, latency_s)[0].attained for share in (clock_share, 1.0))
    return whole <= 1.0 + AGREE < slow


def _noise(facts: Facts, key: CellKey, slowed: Sequence[str], clock_share: float, time_s: Estimate) -> NoiseReport:
    """The noise of a cell's time.

    Many GPUs always run at their power cap, and their ceilings were measured with it. So a power cap counts only if the
    clock differs from that of the ceilings.
    """
    repetitions = facts.repetitions[key.cell]
    return noise_report(
        phase_samples(key.phase, repetitions),
        time_s,
        foreign_cores=foreign_cores(repetitions),
        throttled=[name for name in slowed if name != POWER_CAP or clock_share < THROTTLED],
        machine_drift=drift(facts.drift_readings, on_gpu=facts.device.kind == "cuda"),
    )


def _graph_step_s(facts: Facts, key: CellKey, latency_s: float) -> float | None:
    """Seconds of a decode step replayed as one CUDA graph; None if no engine of the run records graphs.

    Other savings of that engine, such as a cache that is not copied, are added back.
    """
    if key.phase != "decode" or key.cell.engine in facts.graph_engines:
        return None
    for engine in sorted(facts.graph_engines):
        recorded = replace(key, cell=replace(key.cell, engine=engine))
        if repetitions := facts.repetitions.get(recorded.cell):
            graph_s = float(np.median(np.concatenate(phase_samples("decode", repetitions))))
            steps = ((key, latency_s), (recorded, graph_s))
            own_s, its_s = (sum(breakdown_of(facts, each, time_s)[1].values()) for each, time_s in steps)
            return graph_s + own_s - its_s
    return None


def _sides(row: CellResult, sides: Mapping[Series, Mapping[int, BoundSide]]) -> dict[str, str]:
    """The side that doubling a cell's size indicates, by axis (for the largest size, doubling to it)."""
    return {series[0]: sides[series][getattr(row, SIZE_OF[series[0]])] for series in series_of(row) if series in sides}


def _engines_on(key: CellKey, differences: Sequence[EngineDifference], facts: Facts) -> tuple[EngineDifference, ...]:
    """The engines that were compared with this cell's own; `generate`, whose overhead is reported apart, is not one."""
    return tuple(
        item
        for item in differences
        if item.engine not in facts.generate_engines
        and replace(item.key, cell=replace(item.key.cell, engine=item.against)) == key
    )
