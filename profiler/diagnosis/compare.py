"""Runs of one model in several precisions, held against the first: pure functions of their folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from profiler.record.run import Run

_CELL = ["phase", "engine", "batch_size", "prompt_len", "context_len"]


@dataclass(frozen=True)
class Against:
    """One cell of one precision against the same cell of the first."""

    precision: str
    phase: str
    batch_size: int
    depth: int
    time_s: float
    speed_up: float
    """Time of the first precision over this one's: above 1 it is faster."""
    low: float
    high: float


def against_first(runs: Sequence[Run]) -> list[Against]:
    """Every cell of the further runs beside the first one's, with the interval of the ratio."""
    first = _cells(runs[0])
    found = []
    for run in runs[1:]:
        both = first.merge(_cells(run), on=_CELL, suffixes=("_first", ""))
        for row in both.to_dict("records"):
            found.append(
                Against(
                    precision=run.document.model["quant"],
                    phase=row["phase"],
                    batch_size=row["batch_size"],
                    depth=row["prompt_len"] or row["context_len"],
                    time_s=row["latency_s"],
                    speed_up=row["latency_s_first"] / row["latency_s"],
                    low=row["latency_low_s_first"] / row["latency_high_s"],
                    high=row["latency_high_s_first"] / row["latency_low_s"],
                )
            )
    return found


def sentences(runs: Sequence[Run]) -> list[str]:
    """What each precision saves in memory, and where it wins and loses against the first."""
    base = runs[0].document.model
    found = []
    for run in runs[1:]:
        model, name = run.document.model, run.document.model["quant"]
        smaller = base["storage_bytes"] / model["storage_bytes"]
        parts = [f"{name} takes {smaller:.2g}x less memory than {base['quant']} in {base['dtype']}"]
        cells = [item for item in against_first(runs) if item.precision == name]
        for phase in ("decode", "prefill"):
            of_phase = [item for item in cells if item.phase == phase]
            if of_phase:
                parts.append(f"{phase} {_fate(of_phase, phase)}")
        found.append("; ".join(parts) + ".")
    return found


def _fate(cells: Sequence[Against], phase: str) -> str:
    """Where a precision wins and loses in one phase; only cells whose whole interval says so count."""
    wins, losses = [item for item in cells if item.low > 1], [item for item in cells if item.high < 1]
    best, worst = max(cells, key=lambda item: item.speed_up), min(cells, key=lambda item: item.speed_up)
    if not wins and not losses:
        return "is the same within its intervals"
    if not wins:
        return f"is slower throughout (down to {worst.speed_up:.2g}x at batch {worst.batch_size} x {worst.depth})"
    if not losses:
        return f"is faster (up to {best.speed_up:.2g}x at batch {best.batch_size} x {best.depth})"
    first = min(losses, key=lambda item: item.batch_size * (item.depth if phase == "prefill" else 1))
    return (
        f"gains up to {best.speed_up:.2g}x and loses in {len(losses)} of {len(cells)} cells, first at batch"
        f" {first.batch_size} x {first.depth}"
    )


def _cells(run: Run) -> pd.DataFrame:
    """Measured cells, keyed by what was asked: a decode row's context is that of its middle step in every run alike."""
    cells = run.cells[run.cells["status"] == "ok"]
    return cells[[*_CELL, "latency_s", "latency_low_s", "latency_high_s"]]
