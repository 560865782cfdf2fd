"""Sides of a comparison, made by hand: times, time breakdowns and drift probes whose truth is known."""

from dataclasses import replace
from typing import Any

from profiler.comparison.side import CellTime, MatchKey, Side
from profiler.facts.ceilings import Ceiling, DriftReading
from profiler.grid.cells import Phase
from profiler.judge.breakdown import TERMS
from profiler.stats import NOTCH, Estimate

SETTINGS = {"model": "m", "device": "card", "precision": "bfloat16", "threads": "2", "transformers": "5.22.0"}


def key_of(batch_size: int = 1, prompt_len: int = 512, phase: Phase = "decode", engine: str = "eager") -> MatchKey:
    return MatchKey(phase, batch_size, prompt_len, 0, engine, ())


def timed(median_s: float, half_width: float = 0.005, repetitions: int = 4, **terms: float) -> CellTime:
    """A time with its interval; the rest after `terms` is unexplained."""
    split = {**dict.fromkeys(TERMS, 0.0), **terms}
    split["unexplained_s"] = median_s - sum(terms.values())
    low_s, high_s = median_s * (1 - half_width), median_s * (1 + half_width)
    return CellTime(Estimate(median_s, low_s, high_s, repetitions), repetitions, split, repetition_s=1.0)


def drift_probe(memory: float = 1.0, compute: float = 1.0, *, spread: float = 0.001, at: float = 0.0) -> dict[str, Any]:
    """Fields of a side on a machine whose drift probe and ceilings take `memory` and `compute` times as long."""
    return {
        "ceilings": {"memory": ceiling(100e9 / memory), "compute": ceiling(1e12 / compute)},
        "ceilings_at_unix_s": at,
        "drift_readings": [
            DriftReading(memory * share, compute * share) for share in (1 - spread, 1.0, 1 + spread, 1.0)
        ],
    }


def ceiling(per_s: float) -> Ceiling:
    """A ceiling that is known to within 1 %."""
    off = 0.005 / NOTCH
    return Ceiling(per_s, (1 - off) * per_s, (1 + off) * per_s, samples=1, method="by hand")


def side(cells: dict[MatchKey, CellTime], **changes: Any) -> Side:
    settings = {**SETTINGS, **changes.pop("settings", {})}
    made = Side("side", "2026-01-01", "roofscope", settings, cells, **drift_probe())
    return replace(made, **changes)
