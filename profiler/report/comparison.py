"""Several runs of one model beside each other, as the rows of two tables."""

from __future__ import annotations

from collections.abc import Sequence

from profiler.diagnosis.precisions import against_first
from profiler.record.run import Run
from profiler.report.lines import regimes
from profiler.report.shown import of_phase
from profiler.units import duration, scaled, significant

PRECISION_COLUMNS = ("precision", "in", "memory", "saved", "decode", "dequantising", "tok/s", "regime")
AGAINST_COLUMNS = ("cell", "precision", "time", "speed-up", "interval")


def precision_rows(runs: Sequence[Run]) -> list[list[str]]:
    """What each precision takes in memory, and what it makes of the smallest decode; in the order of the columns."""
    base = runs[0].model.storage_bytes
    return [
        [
            run.model.quant,
            run.model.dtype,
            scaled(run.model.storage_bytes, "B"),
            scaled(base - run.model.storage_bytes, "B") if base > run.model.storage_bytes else "-",
            *_first_decode(run),
        ]
        for run in runs
    ]


def _first_decode(run: Run) -> list[str]:
    decodes = of_phase(run.measured, "decode")
    if not decodes:
        return ["-"] * 4
    first = decodes[0]
    return [
        duration(first.latency_s),
        duration(first.dequantise_s) if first.dequantise_s else "-",
        significant(first.tokens_per_s),
        regimes(run).get(first.key, "-"),
    ]


def against_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Every cell of the further precisions against the first, in the order of the columns."""
    order = {run.model.quant: number for number, run in enumerate(runs)}
    items = sorted(against_first(runs), key=lambda item: (item.key.phase, order[item.precision], item.key))
    return [
        [
            item.key.name,
            item.precision,
            duration(item.time_s),
            f"{item.speed_up:.2f}x",
            "one visit: no claim" if item.visited_once else f"{item.low:.2f} .. {item.high:.2f}",
        ]
        for item in items
    ]
