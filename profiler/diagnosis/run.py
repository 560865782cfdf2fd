"""A whole run judged from its facts: every cell's row and evidence, series, differences, and the answer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from profiler.diagnosis import advice
from profiler.diagnosis.cell import CellEvidence, CellResult, EngineDifference, JudgedCell, columns_of, counted
from profiler.diagnosis.extremes import extreme_shares
from profiler.diagnosis.facts import Facts
from profiler.diagnosis.generate import GenerateTax, generate_taxes, tax_of
from profiler.diagnosis.inside import unexplained_by_group
from profiler.diagnosis.levers import Setting, floors_on, levers
from profiler.diagnosis.parts import as_served, faults_of, lost_s, model_work, roofs_of, split_of
from profiler.diagnosis.ragged import RaggedStep, ragged_step
from profiler.diagnosis.regimes import Measurement, Verdict, beside, judge
from profiler.diagnosis.roofline import place
from profiler.diagnosis.scaling import SIZE_OF, DoublingTest, Series, Side, doubling_tests, series_of
from profiler.diagnosis.step_time import TERMS, Split, adds_up
from profiler.diagnosis.trials import tried
from profiler.grid import PHASES, Cell, CellKey, Phase
from profiler.machine.datasheet import gpus
from profiler.machine.readings import ActiveShares
from profiler.roofs.values import drift, swing
from profiler.timing.outcomes import Visit, phase_medians, phase_samples
from profiler.timing.sampling import (
    Estimate,
    NoiseReport,
    Spread,
    difference,
    estimate,
    narrow_enough,
    noise_report,
    spread_of,
)

# What is rented most; every other card is in `roofscope gpus`.
_RENTED = ("T4", "L4", "A10G", "L40S", "A100 80GB SXM", "H100 SXM", "H200 SXM", "B200 SXM")
_SIXTEEN_BIT = "bfloat16"
# A residual of more than this share of a step is looked into.
_UNEXPLAINED_SHARE = 0.20
_ENERGY_TICK_S = 0.1
"""How often NVML's energy counter moves at the slowest (20 to 100 ms were seen on data-centre cards)."""
_ENERGY_TOLERANCE = 0.1
_Name = TypeVar("_Name", bound=str)


@dataclass(frozen=True)
class Judgement:
    """What the facts of a run say."""

    cells: tuple[CellResult, ...]
    evidence: tuple[CellEvidence, ...]
    judged: tuple[JudgedCell, ...]
    scaling: tuple[DoublingTest, ...]
    differences: tuple[EngineDifference, ...]
    answer: tuple[str, ...]
    generate: tuple[GenerateTax, ...] = ()
    ragged: tuple[RaggedStep, ...] = ()

    @property
    def unexplained(self) -> list[CellKey]:
        """Cells that leave so much of their time unexplained that it is worth a look, the worst first."""
        found = filter(_is_unexplained, self.judged)
        return [cell.key for cell in sorted(found, key=lambda cell: -cell.split.unexplained_s / cell.split.latency_s)]


def judge_run(facts: Facts) -> Judgement:
    """Every cell of a run judged, and what they say together."""
    spreads = _spreads(facts)
    times = {key: _estimate(facts, key, spreads) for key in facts.measured}
    rows = {key: _timed(facts, key, times.get(key)) for key in facts.grid.keys}
    compute, memory = facts.ceilings.compute_flops_per_s(facts.model.dtype), facts.ceilings.memory_bytes_per_s
    tests = doubling_tests(list(rows.values()), compute, memory)
    sides = {test.series: test.sides for test in tests}
    knees = {test.series: test.knee_predicted for test in tests if test.axis == "batch"}
    found = {
        key: _judged(facts, key, rows[key], times[key], spreads[key.phase], _sides(rows[key], sides)) for key in times
    }
    judged = {key: replace(item.cell, knee=_knee(item.row, knees)) for key, item in found.items()}
    setting, differences = setting_of(facts), _differences(facts, spreads, judged)
    better = _better_batches(judged.values())
    return Judgement(
        cells=tuple(found[key].row if key in found else rows[key] for key in facts.grid.keys),
        evidence=tuple(
            replace(
                item.evidence,
                levers=tuple(levers(judged[key], setting, better[key])),
                at_least_s_on=floors_on(judged[key], setting),
                unexplained_in_s=_unexplained_in(facts, item.cell),
            )
            for key, item in found.items()
        ),
        judged=tuple(judged.values()),
        scaling=tuple(tests),
        differences=tuple(differences),
        answer=tuple(advice.answer(list(judged.values()), setting, differences)),
        generate=tuple(generate_taxes(facts, spreads)),
        ragged=tuple(item.ragged for item in found.values() if item.ragged),
    )


def judge_cells(facts: Facts, cells: Iterable[Cell]) -> dict[CellKey, CellResult]:
    """Rows of some cells alone, as a sweep goes on: what other cells would say of them is left for the end."""
    spreads = _spreads(facts)
    found = {}
    for key in (key for cell in cells for key in cell.keys):
        time_s = _estimate(facts, key, spreads) if facts.visits.get(key.cell) else None
        row = _timed(facts, key, time_s)
        found[key] = row if time_s is None else _judged(facts, key, row, time_s, spreads[key.phase], {}).row
    return found


def setting_of(facts: Facts) -> Setting:
    """What advice needs to know of this device and model."""
    model, device, ceilings = facts.model, facts.device, facts.ceilings
    sixteen = ceilings.compute.get(_SIXTEEN_BIT) if model.dtype == "float32" else None
    return Setting(
        device_name=device.short_name,
        memory_bytes_per_s=ceilings.memory_bytes_per_s,
        compute_flops_per_s=ceilings.compute_flops_per_s(model.dtype),
        weight_bits=8 * model.linear_bytes / model.linear_weights if model.linear_weights else 16.0,
        can_graph=device.kind == "cuda",
        weights=float(model.linear_weights),
        cache_bits=8.0 * model.cache_itemsize,
        four_bit_dense_from_rows=model.four_bit_dense_from_rows,
        sixteen_bit_flops_per_s=sixteen.per_s if sixteen else None,
        cards=tuple(
            gpu
            for gpu in gpus()
            if gpu.gpu in _RENTED and gpu.gpu != device.datasheet and gpu.peak_flops_per_s(model.dtype) is not None
        ),
        dtype=model.dtype,
    )


def _is_unexplained(cell: JudgedCell) -> bool:
    return cell.split.unexplained_s > _UNEXPLAINED_SHARE * cell.split.latency_s


def _unexplained_in(facts: Facts, cell: JudgedCell) -> Mapping[str, float]:
    if not _is_unexplained(cell):
        return {}
    return unexplained_by_group(_at_clock(facts, cell.clock_share), cell.key, cell.split.latency_s)


def _at_clock(facts: Facts, clock_share: float) -> Facts:
    """The same facts with the compute roofs that the card has at a share of the clock at which they were measured."""
    return facts if clock_share == 1.0 else replace(facts, ceilings=facts.ceilings.times(1.0, clock_share))


@dataclass(frozen=True, slots=True)
class _Found:
    row: CellResult
    evidence: CellEvidence
    cell: JudgedCell
    ragged: RaggedStep | None


def _spreads(facts: Facts) -> dict[Phase, Spread]:
    """How far visits of the same cell lie apart in this run, by phase."""
    return {
        phase: spread_of(
            (phase_medians(phase, facts.visits[key.cell]) for key in facts.measured if key.phase == phase),
            swing(facts.looks),
        )
        for phase in PHASES
    }


def _estimate(facts: Facts, key: CellKey, spreads: Mapping[Phase, Spread]) -> Estimate:
    return estimate(phase_samples(key.phase, facts.visits[key.cell]), spreads[key.phase])


def _timed(facts: Facts, key: CellKey, time_s: Estimate | None) -> CellResult:
    """A cell's work and its time, before it is split."""
    gap = facts.gaps.get(key.cell)
    if time_s is None:
        return counted(key, facts.operators[key], gap.status if gap else "skipped")
    return replace(
        counted(key, facts.operators[key], "ok"),
        latency_s=time_s.median_s,
        latency_low_s=time_s.low_s,
        latency_high_s=time_s.high_s,
        samples=time_s.samples,
        tokens_per_s=facts.grid.useful_tokens(key) / time_s.median_s,
        tokens_per_s_per_seq=facts.grid.useful_tokens(key) / key.cell.batch_size / time_s.median_s,
    )


def _judged(
    facts: Facts, key: CellKey, row: CellResult, time_s: Estimate, spread: Spread, sides: Mapping[str, str]
) -> _Found:
    """A cell's time split, placed and judged, under the compute roof of the clock that the card had meanwhile."""
    visits, shares = facts.visits[key.cell], extreme_shares(facts)
    spans = [(visit.at_unix_s, visit.wall_s) for visit in visits]
    activity, slowed = facts.timeline.active(spans), facts.timeline.throttled(spans)
    clock_share = _clock_share(facts, activity)
    facts = as_served(_at_clock(facts, clock_share), key, time_s.median_s)
    flops, nbytes = model_work(facts.operators[key])
    half_width_s = (time_s.high_s - time_s.low_s) / 2
    faults, tax = faults_of(key.phase, visits), tax_of(facts, key, spread)
    parts, avoidable_s = split_of(facts, key, time_s.median_s, half_width_s, faults, tax)
    ragged = ragged_step(facts, key, parts, spread)
    noise = _noise(facts, key, slowed, time_s)

    def judged_at(memory: float, compute: float) -> Verdict:
        under = replace(facts, ceilings=facts.ceilings.times(memory, compute))
        split_under, _ = split_of(under, key, time_s.median_s, half_width_s, faults, tax)
        return judge(_measurement(under, key, split_under, time_s, noise, slowed, sides, activity, clock_share))

    extremes = {name: judged_at(*roofs) for name, roofs in shares.items()}
    verdict = beside(
        judge(_measurement(facts, key, parts, time_s, noise, slowed, sides, activity, clock_share)), extremes
    )
    roofs = roofs_of(facts, key)
    sheet = facts.device.datasheet_flops_per_s, facts.device.datasheet_bytes_per_s
    placement = place(time_s.median_s, flops, nbytes, *sheet)
    judged = JudgedCell(
        key=key,
        tokens_per_s=row.tokens_per_s,
        flops_per_s=placement.flops_per_s,
        bytes_per_s=placement.bytes_per_s,
        split=parts,
        verdict=verdict,
        operators=facts.operators[key],
        memory_bytes=float(facts.predicted_peak_bytes[key.cell]),
        avoidable_s=avoidable_s,
        lost_s=lost_s(facts, key),
        host_pace_s=(roofs.dispatch_s or 0.0) if roofs.overlaps else 0.0,
        clock_share=clock_share,
        tried=tuple(tried(facts.trials.get(key, ()))),
        ways=ragged.ways if ragged else (),
    )
    visited = len(phase_samples(key.phase, visits))
    whole = replace(
        _with_ragged(_with_visits(row, key, visits), ragged),
        flops_per_s=placement.flops_per_s,
        bytes_per_s=placement.bytes_per_s,
        mfu=_known(placement.mfu),
        mbu=_known(placement.mbu),
        attained=parts.attained,
        floor_s=parts.floor_s,
        **{term: getattr(parts, term) for term in TERMS},
        regime=verdict.regime,
        confidence=verdict.confidence,
        noise=noise.grade,
        visits=visited,
        stopped="interval" if narrow_enough(time_s, visited) else "budget",
    )
    evidence = CellEvidence(
        **columns_of(key),
        regime=verdict.regime,
        confidence=verdict.confidence,
        flags=verdict.flags,
        signals=verdict.evidence,
        conflicts=tuple(item.signal for item in verdict.conflicts),
        split_half_widths_s=parts.half_widths_s,
        noise_reasons=noise.reasons,
        predicted_peak_memory_bytes=facts.predicted_peak_bytes[key.cell],
    )
    return _Found(whole, evidence, judged, ragged)


def _measurement(
    facts: Facts,
    key: CellKey,
    parts: Split,
    time_s: Estimate,
    noise: NoiseReport,
    slowed: Sequence[str],
    sides: Mapping[str, str],
    activity: ActiveShares,
    clock_share: float,
) -> Measurement:
    """All that a cell's verdict is drawn from."""
    flops, nbytes = model_work(facts.operators[key])
    visits = facts.visits[key.cell]
    roofs = roofs_of(facts, key)
    runs_ahead = key.phase == "decode" and roofs.overlaps and not (roofs.dispatch and roofs.dispatch.waits)
    return Measurement(
        split=parts,
        model_flops=flops,
        model_bytes=nbytes,
        compute_flops_per_s=facts.ceilings.compute_flops_per_s(facts.model.dtype),
        roofs=roofs,
        latency_low_s=time_s.low_s,
        latency_high_s=time_s.high_s,
        noise=noise.grade,
        offloaded=facts.model.offloaded,
        cache_resident=facts.ceilings.cache_resident(nbytes),
        issue_s=_issue_s(visits) if runs_ahead else None,
        graph_step_s=_graph_step_s(facts, key),
        batch_side=sides.get("batch", ""),
        depth_side=sides.get("prompt" if key.phase == "prefill" else "context", ""),
        sm_active=activity.sm,
        memory_active=activity.memory,
        power_capped="power cap" in slowed,
        clock_share=clock_share,
    )


def _clock_share(facts: Facts, activity: ActiveShares) -> float:
    """The card's clock during a cell over that of its compute roof; 1 where either is not known, or on a CPU."""
    roof_hz = facts.ceilings.compute_clock_hz(facts.model.dtype)
    if facts.device.kind != "cuda" or not roof_hz or not activity.clock_hz:
        return 1.0
    return min(1.0, activity.clock_hz / roof_hz)


def _issue_s(visits: Sequence[Visit]) -> float | None:
    """Seconds until the host had submitted a decode step."""
    return _median([None if visit.issue_s is None else visit.issue_s / len(visit.decode_s) for visit in visits])


def _noise(facts: Facts, key: CellKey, slowed: Sequence[str], time_s: Estimate) -> NoiseReport:
    visits = facts.visits[key.cell]
    busy = [(visit.foreign_cores, visit.wall_s) for visit in visits if visit.foreign_cores is not None]
    foreign = sum(cores * wall_s for cores, wall_s in busy) / sum(wall_s for _, wall_s in busy) if busy else None
    return noise_report(
        phase_samples(key.phase, visits),
        time_s,
        foreign_cores=foreign,
        throttled=slowed,
        machine_drift=drift(facts.looks),
    )


def _graph_step_s(facts: Facts, key: CellKey) -> float | None:
    """The same step as one launch of recorded work, where this run has an engine that does so."""
    if key.phase != "decode" or key.cell.engine in facts.graph_engines:
        return None
    for engine in sorted(facts.graph_engines):
        if visits := facts.visits.get(replace(key.cell, engine=engine)):
            return float(np.median(np.concatenate(phase_samples("decode", visits))))
    return None


def _with_visits(row: CellResult, key: CellKey, visits: Sequence[Visit]) -> CellResult:
    """With what the visits tell beside their time; NaN where it was not measured, or belongs to the other phase."""
    p90_s, p99_s = np.percentile(np.concatenate(phase_samples(key.phase, visits)), [90, 99])
    peaks = [visit.peak_memory_bytes for visit in visits if visit.peak_memory_bytes is not None]
    row = replace(
        row,
        p90_s=float(p90_s),
        p99_s=float(p99_s),
        peak_memory_bytes=max(peaks) if peaks else None,
        device_memory_bytes=_known(_median([visit.device_memory_bytes for visit in visits])),
    )
    if key.phase == "prefill":
        return replace(row, ttft_s=_known(_median([visit.ttft_s for visit in visits])))
    generated = key.cell.batch_size * key.cell.new_tokens
    return replace(
        row,
        first_step_s=_known(_median([visit.decode_s[0] for visit in visits])),
        issue_s=_known(_issue_s(visits)),
        joules_per_token=_known(joules_a_token(visits, generated)),
    )


def _with_ragged(row: CellResult, ragged: RaggedStep | None) -> CellResult:
    """With what unequal prompts cost, where they are."""
    if ragged is None:
        return row
    waiting_s = ragged.waiting_s if row.phase == "decode" else math.nan
    return replace(row, padding=ragged.padding, mask_s=_known(ragged.mask_s), waiting_s=waiting_s)


def joules_a_token(visits: Sequence[Visit], generated: int) -> float | None:
    """Joules for each of the tokens that a visit generates, from all visits together; None where that is too coarse.

    A card counts energy a few times a second, so that a visit may end on the tick that it began on, or be charged a
    whole one more: of n visits the sum is off by about sqrt(n) / 2 ticks.
    """
    counted = [(visit.energy_j, visit.wall_s) for visit in visits if visit.energy_j is not None]
    seconds = sum(wall_s for _, wall_s in counted)
    if not counted or math.sqrt(len(counted)) / 2 * _ENERGY_TICK_S > _ENERGY_TOLERANCE * seconds:
        return None
    return sum(joules for joules, _ in counted) / (generated * len(counted))


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _sides(row: CellResult, known: Mapping[Series, Mapping[int, Side]]) -> dict[str, str]:
    """What doubling each size from a cell speaks for (to it, for the largest), by axis: batch, prompt, context."""
    return {series[0]: known[series][getattr(row, SIZE_OF[series[0]])] for series in series_of(row) if series in known}


def _knee(row: CellResult, knees: Mapping[Series, float | None]) -> float | None:
    """The batch at which FLOPs overtake bytes at a cell's depth, where there is one."""
    return next((knees[series] for series in series_of(row) if series in knees), None)


def _better_batches(judged: Iterable[JudgedCell]) -> dict[CellKey, list[JudgedCell]]:
    """Of each cell, the larger batch of its series that gives the most tokens/s, where there is one."""
    best: dict[tuple[object, ...], JudgedCell] = {}
    found: dict[CellKey, list[JudgedCell]] = {}
    for cell in sorted(judged, key=lambda cell: -cell.key.cell.batch_size):
        so_far = best.get(cell.key.series)
        found[cell.key] = [so_far] if so_far else []
        if so_far is None or cell.tokens_per_s >= so_far.tokens_per_s:
            best[cell.key.series] = cell
    return found


def _differences(
    facts: Facts, spreads: Mapping[Phase, Spread], judged: Mapping[CellKey, JudgedCell]
) -> list[EngineDifference]:
    """What each further engine saves against the first, cell by cell, with its interval."""
    if facts.grid.ragged is not None:
        return []  # without its mask a padded batch is another task, not another engine
    first, *others = facts.grid.engines
    found = []
    for key in facts.grid.keys:
        base = replace(key.cell, engine=first)
        if key.cell.engine not in others or not (facts.visits.get(key.cell) and facts.visits.get(base)):
            continue
        before, after = (phase_samples(key.phase, facts.visits[each]) for each in (base, key.cell))
        saved = difference(before, after, spreads[key.phase])
        found.append(
            EngineDifference(
                **columns_of(key),
                against=first,
                saves_s=saved.median_s,
                low_s=saved.low_s,
                high_s=saved.high_s,
                terms=_gained_terms(judged[replace(key, cell=base)], judged[key]),
                causes=_gained(judged[replace(key, cell=base)].avoidable_s, judged[key].avoidable_s),
                how=facts.owning_engines.get(key.cell.engine, ""),
                visits=min(len(before), len(after)),
            )
        )
    return found


def _gained_terms(before: JudgedCell, after: JudgedCell) -> dict[str, float]:
    if not (adds_up(before.split) and adds_up(after.split)):
        return {}
    return _gained(*({term: getattr(cell.split, term) for term in TERMS} for cell in (before, after)))


def _gained(before: Mapping[_Name, float], after: Mapping[_Name, float]) -> dict[str, float]:
    """What each of two maps' names gained, without those that both lack."""
    gained = {str(name): after.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **after}}
    return {name: seconds for name, seconds in gained.items() if seconds}
