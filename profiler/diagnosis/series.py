"""Doubling tests over the cells of a run: along batch, prompt and context."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pandas as pd

from profiler.diagnosis.scaling import Point, Scaling, scaling, sentences

# What is doubled, and what stays fixed meanwhile.
AXES = {
    "batch": ("batch_size", ["phase", "engine", "prompt_len", "context_len"]),
    "prompt": ("prompt_len", ["phase", "engine", "batch_size"]),
    "context": ("context_len", ["phase", "engine", "batch_size"]),
}


def doubling_tests(cells: pd.DataFrame, flops_per_s: float, bytes_per_s: float) -> list[dict[str, Any]]:
    """Every series of two sizes or more among the cells that have a number, as records for run.json.

    Each names its axis (`batch`, `prompt` for prefills, `context` for decodes), what was held fixed, its slopes beside
    the predicted ones, and its sentences. The roofs are those that FLOPs and bytes were measured under.
    """
    measured = cells[cells["status"] == "ok"]
    found = []
    for axis, (column, fixed) in AXES.items():
        of_axis = measured[measured["phase"] == _PHASE_OF[axis]] if axis in _PHASE_OF else measured
        for key, group in of_axis.groupby(fixed, sort=False):
            if group[column].nunique() < 2:
                continue
            result = scaling([_point(row, column) for row in group.to_dict("records")], flops_per_s, bytes_per_s)
            found.append(_record(axis, dict(zip(fixed, key, strict=True)), result))
    return found


_PHASE_OF = {"prompt": "prefill", "context": "decode"}


def _point(row: dict[Any, Any], column: str) -> Point:
    return Point(
        size=int(row[column]),
        time_s=row["latency_s"],
        low_s=row["latency_low_s"],
        high_s=row["latency_high_s"],
        flops=float(row["model_flops"]),
        bytes=float(row["model_bytes"]),
        tokens_per_s=row["tokens_per_s"],
    )


def _record(axis: str, fixed: dict[str, Any], result: Scaling) -> dict[str, Any]:
    plain = {name: value if isinstance(value, str) else int(value) for name, value in fixed.items()}
    return {"axis": axis, "fixed": plain, **asdict(result), "sentences": sentences(result, axis)}
