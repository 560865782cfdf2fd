"""Forecast results: predicted cells, their cross-validated error, and later measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from profiler.grid.cells import Phase
from profiler.judge.breakdown import TERMS
from profiler.judge.cells import CellResult
from profiler.predict.cross_validation import HeldOut, Trained
from profiler.predict.operator_arrays import Array
from profiler.predict.predict import Forecast, Terms, predicted_regimes

BETWEEN_CELLS = "between measured cells"


@dataclass(frozen=True)
class ForecastCell:
    """One forecast cell as it is told."""

    phase: Phase
    batch_size: int
    prompt_len: int
    context_len: int
    latency_s: float
    low_s: float
    high_s: float
    """Nine in ten such forecasts come to lie between these."""
    tokens_per_s: float
    regime: str
    basis: str
    """`between measured cells`, `measured`, or what carries the forecast beyond them."""
    fits: bool = True
    """Whether the memory model finds room for it."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each term of its split, what they leave unexplained included."""


@dataclass(frozen=True)
class ForecastError:
    """How far off such forecasts are, from cells that they had not seen."""

    median: float | None
    p90: float | None
    cells: int
    how: str
    """What was left out of what."""


@dataclass(frozen=True)
class MeasuredPoint:
    """A measured cell, with what it was forecast to take from the others."""

    phase: Phase
    batch_size: int
    depth: int
    latency_s: float
    unseen_s: float | None
    """None where it was not held out."""


@dataclass(frozen=True)
class Answer:
    """A forecast with its basis and its error."""

    source: str
    model: str
    precision: str
    on: str
    how: str
    error: ForecastError
    beyond: ForecastError | None
    cells: tuple[ForecastCell, ...]
    notes: tuple[str, ...] = ()
    measured: tuple[MeasuredPoint, ...] = ()


def cross_validated_error(held: HeldOut, how: str) -> ForecastError:
    """The error of held-out cells; none where there are too few of them."""
    if not held.told:
        return ForecastError(None, None, len(held.errors), how)
    return ForecastError(held.median, held.p90, len(held.errors), how)


def cells_of(
    trained: Trained, forecast: Forecast, factor: Array | None = None, off: Array | None = None
) -> tuple[ForecastCell, ...]:
    """Every forecast cell; `factor` multiplies times for another form, `off` is by how much it may be off (log)."""
    low_s, high_s = trained.bounds(forecast)
    latency_s = forecast.latency_s
    if factor is not None and off is not None:
        spread = np.exp(np.hypot(np.log(high_s / latency_s), off))
        latency_s = latency_s * factor
        low_s, high_s = latency_s / spread, latency_s * spread
    carried = ["; ".join(words) or BETWEEN_CELLS for words in trained.assumptions(forecast)]
    fits = forecast.fits(trained.fitted.device.memory_bytes)
    return forecast_cells(forecast, latency_s, (low_s, high_s), carried, fits)


def _terms_at(terms: Terms, index: int, latency_s: float) -> dict[str, float]:
    found = {item.name: float(getattr(terms, item.name)[index]) for item in fields(terms) if item.name != "padding_s"}
    return {**found, "unexplained_s": latency_s - sum(found.values())}


def forecast_cells(
    forecast: Forecast, latency_s: Array, bounds_s: tuple[Array, Array], basis: Sequence[str], fits: Array
) -> tuple[ForecastCell, ...]:
    """Forecast steps as they are told, one by one."""
    steps = forecast.demanded.steps
    return tuple(
        ForecastCell(
            "prefill" if steps.prefill[index] else "decode",
            int(steps.batch[index]),
            int(steps.prompt_len[index]),
            int(steps.context[index]),
            float(latency_s[index]),
            float(bounds_s[0][index]),
            float(bounds_s[1][index]),
            float(steps.tokens[index] / latency_s[index]),
            regime,
            basis[index],
            bool(fits[index]),
            _terms_at(forecast.terms, index, float(latency_s[index])),
        )
        for index, regime in enumerate(predicted_regimes(forecast.terms))
    )


def points_of(trained: Trained) -> tuple[MeasuredPoint, ...]:
    """Every measured cell with its forecast from the others."""
    steps, unseen = (
        trained.measured.demanded.steps,
        dict(zip(trained.within.index, trained.within.seconds, strict=True)),
    )
    depth = np.where(steps.prompt_len > 0, steps.prompt_len, steps.context)
    return tuple(
        MeasuredPoint(
            "prefill" if steps.prefill[index] else "decode",
            int(steps.batch[index]),
            int(depth[index]),
            float(trained.measured.latency_s[index]),
            float(unseen[index]) if index in unseen else None,
        )
        for index in range(len(steps))
    )


@dataclass(frozen=True)
class CheckRow:
    """One cell, forecast and measured."""

    forecast: ForecastCell
    measured: CellResult

    @property
    def error(self) -> float:
        """forecast / measured - 1"""
        return self.forecast.latency_s / self.measured.latency_s - 1

    @property
    def inside(self) -> bool:
        return self.forecast.low_s <= self.measured.latency_s <= self.forecast.high_s

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by which each term was forecast too long."""
        return {
            name: self.forecast.terms.get(name, 0.0) - getattr(self.measured, name)
            for name in TERMS
            if not math.isnan(getattr(self.measured, name))
        }


@dataclass(frozen=True)
class Checked:
    """All cells of a check."""

    rows: tuple[CheckRow, ...]
