"""Rows of cells.csv: a cell's counts and its times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from profiler.facts.run_facts import Facts
from profiler.facts.visits import Status, Visit, median_issue_s, phase_samples
from profiler.grid.cells import CellKey
from profiler.judge.cells import CellResult, counted_row
from profiler.judge.padding import RaggedStep
from profiler.stats import Estimate, percentile

_ENERGY_TICK_S = 0.1
"""The longest update interval of NVML's energy counter (20 to 100 ms were seen on data-centre GPUs)."""
_ENERGY_TOLERANCE = 0.1


def timed_row(facts: Facts, key: CellKey, time_s: Estimate | None) -> CellResult:
    """The row of a cell's work and its measured or forecast time, without a time breakdown."""
    if time_s is not None:
        row = _with_time(facts, key, "ok", time_s.median_s, time_s.low_s, time_s.high_s)
        return replace(row, samples=time_s.samples, visits=len(phase_samples(key.phase, facts.visits[key.cell])))
    gap, forecast = facts.gaps.get(key.cell), facts.forecasts.get(key)
    if gap is None and forecast is not None:
        return _with_time(facts, key, "forecast", forecast.latency_s, forecast.low_s, forecast.high_s)
    return counted_row(key, facts.operators[key], gap.status if gap else "skipped")


def _with_time(facts: Facts, key: CellKey, status: Status, latency_s: float, low_s: float, high_s: float) -> CellResult:
    tokens = facts.grid.useful_tokens(key)
    return replace(
        counted_row(key, facts.operators[key], status),
        latency_s=latency_s,
        latency_low_s=low_s,
        latency_high_s=high_s,
        tokens_per_s=tokens / latency_s,
        tokens_per_s_per_seq=tokens / key.cell.batch_size / latency_s,
    )


def with_visits(row: CellResult, key: CellKey, visits: Sequence[Visit]) -> CellResult:
    """The row with percentiles, memory and energy of its visits; NaN if not measured or of the other phase."""
    samples = list(chain.from_iterable(phase_samples(key.phase, visits)))
    peaks = [visit.peak_memory_bytes for visit in visits if visit.peak_memory_bytes is not None]
    row = replace(
        row,
        p90_s=percentile(samples, 90),
        p99_s=percentile(samples, 99),
        peak_memory_bytes=max(peaks) if peaks else None,
        device_memory_bytes=or_nan(_median([visit.device_memory_bytes for visit in visits])),
    )
    if key.phase == "prefill":
        first_s = [ttft_s for visit in visits for ttft_s in visit.ttfts_s]
        return replace(
            row,
            ttft_s=or_nan(_median(first_s)),
            ttft_p90_s=percentile(first_s, 90),
            ttft_p95_s=percentile(first_s, 95),
            ttft_p99_s=percentile(first_s, 99),
            ttft_samples=len(first_s),
        )
    return replace(
        row,
        first_step_s=or_nan(_median([visit.decode_s[0] for visit in visits])),
        issue_s=or_nan(median_issue_s(visits)),
        joules_per_token=or_nan(joules_a_token(visits)),
    )


def with_ragged(row: CellResult, ragged: RaggedStep | None) -> CellResult:
    """The row with the costs of unequal prompts; unchanged if they are equal."""
    if ragged is None:
        return row
    waiting_s = ragged.waiting_s if row.phase == "decode" else math.nan
    return replace(row, padding=ragged.padding, mask_s=or_nan(ragged.mask_s), waiting_s=waiting_s)


def joules_a_token(visits: Sequence[Visit]) -> float | None:
    """Joules per generated token over all visits; None if the energy counter is too coarse for their length.

    A visit that had little time generated fewer tokens than its cell has.

    A GPU updates its counter a few times per second. So a visit may be charged no tick, or one too many: the sum over n
    visits is off by about sqrt(n) / 2 ticks.
    """
    metered = [(visit, visit.energy_j) for visit in visits if visit.energy_j is not None]
    seconds = sum(visit.wall_s for visit, _ in metered)
    if not metered or math.sqrt(len(metered)) / 2 * _ENERGY_TICK_S > _ENERGY_TOLERANCE * seconds:
        return None
    generated = sum(visit.cell.batch_size * (1 + len(visit.decode_s)) for visit, _ in metered)
    return sum(joules for _, joules in metered) / generated


def or_nan(value: float | None) -> float:
    """The value, or NaN for None, as columns of cells.csv have it."""
    return math.nan if value is None else value


def _median(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None
