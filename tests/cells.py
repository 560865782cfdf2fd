"""Cells of a run, by phase, batch size and prompt length."""

from __future__ import annotations

import pandas as pd

import profiler


def row(run: profiler.Run, phase: str, batch: int, prompt: int) -> pd.Series:
    """Return the only row of `run.cells` with these values."""
    cells = run.cells
    [found] = cells[
        (cells["phase"] == phase) & (cells["batch_size"] == batch) & (cells["prompt_len"] == prompt)
    ].to_dict("records")
    return pd.Series(found)
