"""Judge a run from its facts: rows, evidence, doubling tests, engine differences and the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from profiler.facts.ceilings import AGREE, drift, swing
from profiler.facts.measurements import NotTried
from profiler.facts.operators import REST, Cause
from profiler.facts.repetitions import foreign_cores, phase_samples, repetition_spreads
from profiler.facts.run_facts import Facts
from profiler.facts.telemetry import POWER_CAP, ActiveShares
from profiler.grid.cells import CellKey
from profiler.judge import demand
from profiler.judge.answer import Answer, answer_of
from profiler.judge.cell_stages import Judged, Timed
from profiler.judge.cells import CellEvidence, CellResult, evidence_of, row_of
from profiler.judge.changes import Setting, changes
from profiler.judge.engine_differences import (
    GenerateOverhead,
    engine_differences,
    generate_adds_s,
    generate_overheads,
    ragged_step,
)
from profiler.judge.machine_speed import at_median_speed, busy_sentences
from profiler.judge.module_times import unexplained_by_group
from profiler.judge.regimes import THROTTLED, Measurement, holds_over_interval, judge_cell, within_ceiling_range
from profiler.judge.savings import EngineDifference, trial_results
from profiler.judge.scaling import Axis, BoundSide, DoublingTest, doubling_tests, series_of, size_of
from profiler.loading.changes import Circumstances
from profiler.stats import Estimate, RepetitionSpread, estimate, noise_report

_SIXTEEN_BIT = ("bfloat16", "float16")
# The unexplained share of a step above which it is measured by operator group.
_UNEXPLAINED_SHARE = 0.20


@dataclass(frozen=True)
class TimedRun:
    """The times of a run's cells."""

    facts: Facts
    """At the machine's median speed, with the compute ceiling that the whole run shows."""
    cells: Mapping[CellKey, Timed]

    @cached_property
    def steady(self) -> dict[CellKey, Estimate]:
        """The times of measured cells, without the term of the machine's drift."""
        return {key: cell.steady for key, cell in self.cells.items() if cell.status == "ok"}


@dataclass(frozen=True)
class BrokenDownRun:
    """Where the times of a run's cells go, and the limit of each cell."""

    timed: TimedRun
    cells: Mapping[CellKey, Judged]
    """The measured cells; none without both ceilings."""
    tests: tuple[DoublingTest, ...]

    @property
    def rows(self) -> dict[CellKey, CellResult]:
        """The cells as they are in cells.csv."""
        device = self.timed.facts.device
        return {key: row_of(self.cells.get(key, cell), device) for key, cell in self.timed.cells.items()}

    @property
    def unexplained(self) -> list[CellKey]:
        """Cells of which more than a fifth of the time is unexplained, the worst first."""
        shares = {key: cell.terms.unexplained_s / cell.terms.latency_s for key, cell in self.cells.items()}
        return sorted((key for key in shares if shares[key] > _UNEXPLAINED_SHARE), key=lambda key: -shares[key])


@dataclass(frozen=True)
class Judgement:
    """The results that follow from the facts of a run."""

    cells: tuple[CellResult, ...]
    differences: tuple[EngineDifference, ...]
    scaling: tuple[DoublingTest, ...]
    generate: tuple[GenerateOverhead, ...]
    judged: tuple[Judged, ...]
    evidence: tuple[CellEvidence, ...]
    answer: Answer


def judge_run(facts: Facts) -> Judgement:
    """Judge every cell of a run, and compare cells with each other."""
    return advise_run(break_down_run(time_run(facts)))


def time_run(facts: Facts, keys: Sequence[CellKey] | None = None) -> TimedRun:
    """The time of every cell, or of these `keys`, with its interval."""
    facts = demand.over_the_run(at_median_speed(facts)[0])
    swung = swing(facts.drift_readings, on_gpu=facts.device.kind == "cuda")
    spreads = repetition_spreads(facts.measured, facts.repetitions, swung)
    keys = facts.grid.keys if keys is None else keys
    return TimedRun(facts, {key: _timed(facts, key, spreads[key.phase]) for key in keys})


def break_down_run(timed: TimedRun) -> BrokenDownRun:
    """The terms and the limit of each time; none without both ceilings."""
    facts = timed.facts
    if not facts.ceilings.judges:
        return BrokenDownRun(timed, {}, ())
    tests = doubling_tests(
        tuple(timed.cells.values()),
        facts.ceilings,
        drift(facts.drift_readings, on_gpu=facts.device.kind == "cuda"),
    )
    sides = {test.series: test.sides for test in tests}  # of the largest size, that of doubling to it
    cells = {}
    for key in timed.steady:
        of_cell = {each[0]: sides[each][size_of(key, each[0])] for each in series_of(key) if each in sides}
        cells[key] = _judge(timed, timed.cells[key], of_cell)
    return BrokenDownRun(timed, cells, tuple(tests))


def advise_run(run: BrokenDownRun) -> Judgement:
    """The differences between engines, what would save time in each cell, and the answer in sentences."""
    facts, steady = run.timed.facts, run.timed.steady
    differences, busy = tuple(engine_differences(facts, steady, run.cells)), busy_sentences(facts)
    setting = replace(setting_of(facts), busy=bool(busy))
    # The overhead of `generate` is reported apart.
    others = [item for item in differences if item.engine not in facts.generate_engines]
    judged, evidence, unexplained = [], [], run.unexplained
    for key, cell in run.cells.items():
        cell = replace(cell, engines=tuple(item for item in others if item.key.on(item.against) == key))
        judged.append(replace(cell, changes=tuple(changes(cell, setting))))
        at_clock = _at_clock(facts, cell.timed.clock_share)
        by_group = unexplained_by_group(at_clock, key, cell.terms.latency_s) if key in unexplained else {}
        evidence.append(evidence_of(judged[-1], facts.predicted_peak_bytes[key.cell], by_group))
    tried = {trial.line for trials in facts.trials.values() for trial in trials}
    # What a part of the run had no time for, a later part may have tried.
    cut = [item for item in facts.latest_by(NotTried, "line") if item.line not in tried]
    return Judgement(
        cells=tuple(run.rows.values()),
        differences=differences,
        scaling=run.tests,
        generate=tuple(generate_overheads(facts, steady)),
        judged=tuple(judged),
        evidence=tuple(evidence),
        answer=answer_of(judged, setting, differences, busy, cut),
    )


def setting_of(facts: Facts) -> Setting:
    """The properties of the device and the model on which advice depends."""
    model, device, ceilings = facts.model, facts.device, facts.ceilings
    sixteen_bit = {name: ceilings.compute[name].per_s for name in _SIXTEEN_BIT if name in ceilings.compute}
    fastest = max(sixteen_bit, key=lambda name: sixteen_bit[name], default=None)
    is_wide, ceiling = model.dtype == "float32", ceilings.compute_ceiling(model.dtype)
    sustained, wide = (ceiling.low_per_s, ceiling.high_per_s), ceilings.compute.get("float32")
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
        float32_flops_per_s=wide.per_s
        if wide and wide.per_s > max(ceiling.per_s, *sixteen_bit.values(), 0.0)
        else None,
        sixteen_bit_dtype=fastest or _SIXTEEN_BIT[0] if is_wide else model.dtype,
        sustained_flops_per_s=sustained if device.kind == "cuda" and ceiling.measured else (),
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


def _timed(facts: Facts, key: CellKey, spread: RepetitionSpread) -> Timed:
    cell = Timed(key, facts.operators[key], "skipped", facts.grid.useful_tokens(key))
    gap, forecast, repetitions = facts.gaps.get(key.cell), facts.forecasts.get(key), facts.repetitions.get(key.cell)
    if repetitions:
        samples = phase_samples(key.phase, repetitions)
        spans = [span for repetition in repetitions for span in repetition.spans(key.phase)]
        cell = replace(
            cell,
            status="ok",
            time=estimate(samples, spread),
            steady=estimate(samples, replace(spread, drift=0.0)),
            repetitions=repetitions,
            samples=samples,
            activity=facts.timeline.active(spans),
            slowed=facts.timeline.throttled(spans, key.phase),
        )
        return _with_clock(facts, cell, _clock_share(facts, key, cell.activity))
    if gap is not None:
        return replace(cell, status=gap.status)
    if forecast is not None:
        return replace(cell, status="forecast", time=Estimate(forecast.latency_s, forecast.low_s, forecast.high_s, 0))
    return cell


def _with_clock(facts: Facts, cell: Timed, clock_share: float) -> Timed:
    """The cell at a share of the clock of the ceilings, and the noise of its time.

    Many GPUs always run at their power cap, and their ceilings were measured with it. So a power cap counts only if the
    clock differs from that of the ceilings.
    """
    return replace(
        cell,
        clock_share=clock_share,
        noise=noise_report(
            cell.samples,
            cell.time,
            foreign_cores=foreign_cores(cell.repetitions),
            throttled=[name for name in cell.slowed if name != POWER_CAP or clock_share < THROTTLED],
            machine_drift=drift(facts.drift_readings, on_gpu=facts.device.kind == "cuda"),
        ),
    )


def _at_clock(facts: Facts, clock_share: float) -> Facts:
    return facts if clock_share == 1.0 else replace(facts, ceilings=facts.ceilings.times(1.0, clock_share))


def _judge(run: TimedRun, cell: Timed, sides: Mapping[Axis, BoundSide]) -> Judged:
    """Break down and judge a cell's time, with the compute ceiling at the GPU's clock during its repetitions."""
    facts, key = run.facts, cell.key
    if cell.clock_share < 1.0:
        clocks = (_at_clock(facts, share) for share in (cell.clock_share, 1.0))
        its, full = (demand.breakdown_of(at, key, cell.latency_s)[0].attained for at in clocks)
        # A step that is faster than its clock allows, but not than the whole clock, disproves the reading.
        if full <= 1.0 + AGREE < its:
            cell = _with_clock(facts, cell, 1.0)
    shares = demand.extreme_shares(facts)
    facts = demand.as_served(_at_clock(facts, cell.clock_share), key, cell.latency_s)
    measurement, redundant_s = _measurement(facts, cell, sides, run.steady)
    scaled = {name: replace(facts, ceilings=facts.ceilings.times(*pair)) for name, pair in shares.items()}
    extremes = {name: judge_cell(_measurement(each, cell, sides, run.steady)[0]) for name, each in scaled.items()}
    verdict = within_ceiling_range(judge_cell(measurement), extremes)
    if cell.noise.grade == "unusable" and holds_over_interval(measurement, verdict.regime):
        # A wide interval whose conclusion is certain.
        cell = replace(cell, noise=replace(cell.noise, grade="noisy"))
        measurement = replace(measurement, cell=cell)
    terms, lost, (flops, _) = measurement.terms, demand.lost_s(facts, key), demand.total_work(cell.operators)
    ceiling_s = sum(float(item.flops) / facts.ceilings.compute_flops_per_s(item.dtype) for item in cell.operators)
    return Judged(
        measurement,
        verdict,
        # As if every matmul were at the ceiling of its dtype.
        ceiling_flops_per_s=flops / ceiling_s if ceiling_s else measurement.compute_flops_per_s,
        redundant_s=redundant_s,
        lost_s=lost,
        small_kernels_s=max(0.0, terms.kernel_s - sum(lost.values())) if REST in facts.replays.get(key, {}) else None,
        traced_small_s=demand.small_kernels_s(facts, key, terms, redundant_s),
        longest=facts.activity[key].longest if key in facts.activity else (),
        ragged=ragged_step(facts, key, terms, run.steady),
        tried=tuple(trial_results(facts.trials.get(key, ()))),
    )


def _measurement(
    facts: Facts, cell: Timed, sides: Mapping[Axis, BoundSide], steady: Mapping[CellKey, Estimate]
) -> tuple[Measurement, Mapping[Cause, float]]:
    key = cell.key
    faults, generate = demand.faults_of(key.phase, cell.repetitions), generate_adds_s(facts, key, steady)
    terms, redundant_s = demand.breakdown_of(facts, key, cell.latency_s, cell.half_width_s, faults, generate)
    measurement = Measurement(
        terms,
        cell,
        compute_flops_per_s=facts.ceilings.compute_flops_per_s(facts.model.dtype),
        ceilings=demand.ceilings_of(facts, key),
        offloaded=bool(facts.model.offloaded_bytes),
        cache_resident=facts.ceilings.cache_resident(demand.working_set_bytes(key.phase, cell.operators)),
        graph_step_s=_graph_step_s(facts, key, terms.latency_s),
        sides=sides,
        traffic=demand.counted_traffic(facts, key),
    )
    return measurement, redundant_s


def _clock_share(facts: Facts, key: CellKey, activity: ActiveShares) -> float:
    """The GPU's clock during a cell over that of its compute ceiling; 1 if one is unknown, or on a CPU.

    A short prefill runs at the full clock, and the ceiling was measured at the power limit. The share is at most that
    of the burst. Clocks are read ten times a second: matmuls that a trace saw run faster show a higher one.
    """
    ceiling = facts.ceilings.compute_ceiling(facts.model.dtype)
    if facts.device.kind != "cuda" or not ceiling.clock_hz or not activity.clock_hz:
        return 1.0
    traced = demand.traced_matmuls(facts, key)
    own = traced.flops_per_s / ceiling.per_s if traced is not None else 0.0
    return min(ceiling.at_full_clock, max(own, activity.clock_hz / ceiling.clock_hz))


def _graph_step_s(facts: Facts, key: CellKey, latency_s: float) -> float | None:
    """Seconds of a decode step as one CUDA graph, with other savings of its engine added back; None without one."""
    if key.phase != "decode" or key.cell.engine in facts.graph_engines:
        return None
    for engine in sorted(facts.graph_engines):
        recorded = key.on(engine)
        if repetitions := facts.repetitions.get(recorded.cell):
            graph_s = float(np.median(np.concatenate(phase_samples("decode", repetitions))))
            steps = ((key, latency_s), (recorded, graph_s))
            own_s, its_s = (sum(demand.breakdown_of(facts, each, time_s)[1].values()) for each, time_s in steps)
            return graph_s + own_s - its_s
    return None
