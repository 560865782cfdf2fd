"""The screen and the JSON of a forecast, and of its check."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from profiler.json_document import Document, view
from profiler.judge.breakdown import TERM_NAMES
from profiler.predict.result import Answer, CheckRow, ForecastCell, ForecastError, StepShape
from profiler.report.blocks import Lines, Section, Sentences, text_table
from profiler.report.conditions import answer_sentences, error_share, forecast_table
from profiler.units import duration


def forecast_section(answer: Answer) -> Section:
    """A forecast: its error first, a row per cell, and the assumptions of extrapolated cells."""
    table, notes = forecast_table(answer.cells)
    return Section("", [Sentences(answer_sentences(answer), plain_from=2), table, Lines(notes, "dim")])


CHECK_COLUMNS = ("cell", "forecast", "measured", "off", "inside", "largest error by term")


def check_section(checked: Sequence[CheckRow]) -> Section:
    """Forecast and measured times next to each other, with the term that has the largest error."""
    off = statistics.median(abs(row.error) for row in checked) if checked else math.nan
    inside = sum(row.inside for row in checked)
    head = f"Checked: median {error_share(off)} off; {inside} of {len(checked)} inside their intervals."
    rows = []
    for row in checked:
        term, seconds = max(row.terms.items(), key=lambda item: abs(item[1]), default=("", 0.0))
        rows.append(
            (
                row.forecast.name,
                duration(row.forecast.latency_s),
                duration(row.measured.latency_s),
                f"{100 * row.error:+.1f} %",
                "yes" if row.inside else "no",
                f"{TERM_NAMES.get(term, term)} {1e3 * seconds:+.2f} ms" if term else "",
            )
        )
    table = text_table(CHECK_COLUMNS, rows, wrapped=("cell", "largest error by term"))
    return Section("", [Sentences([head]), table])


@dataclass(frozen=True)
class CheckedForecast(StepShape):
    """A forecast cell next to its measurement."""

    forecast_s: float
    measured_s: float
    error: float
    """Forecast / measured - 1."""
    inside: bool
    """Whether the measurement is inside the forecast's 90 % interval."""
    terms: Mapping[str, float]
    """Forecast minus measured seconds of each term."""


@dataclass(frozen=True)
class ForecastDocument(Document):
    """`roofscope forecast --format json`."""

    source: str
    model: str
    precision: str
    on: str
    how: str
    error: ForecastError
    beyond: ForecastError | None
    """The error outside the range of the measured cells; null if unknown."""
    cells: Sequence[ForecastCell]
    notes: Sequence[str]
    check: Sequence[CheckedForecast] | None = None
    """Only with `--check`."""


def forecast_document(answer: Answer, checked: Sequence[CheckRow] | None) -> ForecastDocument:
    """Return the document of a forecast, with the check of its cells if there was one."""
    return view(ForecastDocument, answer, check=None if checked is None else [_checked_cell(row) for row in checked])


def _checked_cell(row: CheckRow) -> CheckedForecast:
    seconds = {"forecast_s": row.forecast.latency_s, "measured_s": row.measured.latency_s}
    return view(CheckedForecast, row.forecast, error=row.error, inside=row.inside, terms=row.terms, **seconds)
