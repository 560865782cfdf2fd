"""The screen of a forecast."""

from collections.abc import Sequence

from profiler.counting.floor import CLOSE
from profiler.predict.result import BETWEEN_CELLS, ForecastCell, ForecastDocument, ForecastError
from profiler.report.blocks import Lines, Section, Sentences, TextTable, text_table
from profiler.units import duration, percent, significant


def forecast_section(answer: ForecastDocument) -> Section:
    """A forecast: its error first, a row per cell, and the assumptions of extrapolated cells."""
    table, notes = _table(answer.cells)
    return Section("", [Sentences(_sentences(answer), plain_from=2), table, Lines(notes, "dim")])


def _error_sentence(error: ForecastError) -> str:
    """Return `median 3.1 %, nine in ten within 8 %, over 32 cells that it had not seen`, or why it is unknown."""
    if not error.cells:
        return f"not known: {error.how}"
    if error.median is None or error.p90 is None:
        return f"not known: {error.cells} cells are too few to cross-validate, so the intervals are wide"
    return (
        f"median {_error_share(error.median)}, nine in ten within {_error_share(error.p90)}, over {error.cells} cells"
        f" that it had not seen ({error.how})"
    )


def _error_share(share: float) -> str:
    """Return a share of an error: `3.1 %`, or `12 %` from 10 % on."""
    return f"{100 * share:.1f} %" if share < 0.0995 else percent(share)


def _sentences(answer: ForecastDocument) -> list[str]:
    lines = [
        f"Forecast: {answer.model} ({answer.precision}) on {answer.on}, {answer.how}.",
        f"Error: {_error_sentence(answer.error)}.",
    ]
    if answer.beyond is not None and answer.beyond.cells:
        lines.append(f"Beyond what was measured: {_error_sentence(answer.beyond)}.")
    return [*lines, *answer.notes]


def _table(cells: Sequence[ForecastCell]) -> tuple[TextTable, list[str]]:
    """Return a row per cell, and notes: what `close` means, and each assumption by the number in the last column."""
    assumptions: list[str] = []
    rows = []
    for cell in cells:
        marks = []
        for text in [] if cell.basis == BETWEEN_CELLS else cell.basis.split("; "):
            if text not in assumptions:
                assumptions.append(text)
            marks.append(f"[{assumptions.index(text) + 1}]")
        texts = ["does not fit", "-", "-", "memory full"]
        if cell.fits:
            texts = [
                duration(cell.latency_s),
                f"{duration(cell.low_s)} .. {duration(cell.high_s)}",
                significant(cell.tokens_per_s),
                cell.regime.removesuffix("-bound") + (" (close)" if cell.tight else ""),
            ]
        rows.append((cell.name, *texts, " ".join(marks)))
    table = text_table(
        ("cell", "time", "nine in ten", "tokens/s", "waits for", "basis"), rows, wrapped=("waits for", "basis")
    )
    close = [f"{CLOSE}."] if any(cell.tight for cell in cells) else []
    return table, [*close, *(f"[{number}] {text}" for number, text in enumerate(assumptions, 1))]
