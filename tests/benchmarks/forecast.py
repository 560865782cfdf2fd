"""A forecast of 24 of a run's 32 cells from the other 8, which are chosen without looking at times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from profiler.counting.operators import Linear
from profiler.forecast.command import RunFacts
from profiler.grid.cells import DEFAULT_ENGINE, CellKey
from profiler.measure.kernels import keys_between
from profiler.predict.kernel_times import MeasuredCells
from profiler.predict.operator_arrays import Array

MORE = Path(__file__).parents[1] / "data" / "forecast"
LIMITS = (0.05, 0.12)
"""Limits of the error with 8 training cells of 32: median, and the bound for nine in ten (a test)."""


def crossed(known: RunFacts) -> Array:
    """Return a choice with each batch size and each prompt length once.

    The smallest are paired, the largest are paired, and those between are paired in opposite orders.
    """
    steps = known.trained.measured.demanded.steps
    batches, prompts = np.unique(steps.batch), np.unique(steps.prompt_len)
    places = np.linspace(0.0, 1.0, max(len(batches), len(prompts)))
    opposite = np.concatenate([places[:1], places[-2:0:-1], places[-1:]])
    pairs = {
        (int(batches[round(left * (len(batches) - 1))]), int(prompts[round(right * (len(prompts) - 1))]))
        for left, right in zip(places, opposite, strict=True)
    }
    return np.flatnonzero([pair in pairs for pair in zip(steps.batch.tolist(), steps.prompt_len.tolist(), strict=True)])


def as_run(measured: MeasuredCells, chosen: Array) -> MeasuredCells:
    """Return the facts that a run of only the `chosen` cells would have, with replays at the rows between them."""
    steps, kept = measured.demanded.steps, measured.at(chosen)
    own = kept.demanded.steps
    columns = own.prefill, own.batch, own.prompt_len, own.context, own.new_tokens
    keys = [
        CellKey.at("prefill" if prefill else "decode", batch, prompt_len, context, new_tokens, DEFAULT_ENGINE)
        for prefill, batch, prompt_len, context, new_tokens in zip(*(of.tolist() for of in columns), strict=True)
    ]
    rows = [key.tokens for key in keys_between(keys)]
    between = measured.replayed.at(np.flatnonzero(np.isin(steps.tokens, rows)))
    linears = {column.operator for column in measured.demanded.columns if isinstance(column.source, Linear)}
    seconds = {name: values for name, values in between.seconds.items() if name in linears}
    return replace(kept, between=replace(between, seconds=seconds))
