"""The screen and the JSON of a forecast: of its cells, of their check, and over the number of GPUs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from profiler.counting.floor import TIGHT
from profiler.forecast.tensor_parallel import RankRow, RanksDocument, RankTimeRow
from profiler.json_document import view
from profiler.judge.breakdown import TERM_NAMES
from profiler.predict.result import Answer, CheckedForecast, ForecastDocument
from profiler.report.blocks import Lines, Section, Sentences, text_table
from profiler.report.conditions import answer_sentences, error_sentence, error_share, forecast_table, waits_for
from profiler.units import duration, percent, significant


def forecast_section(answer: Answer) -> Section:
    """A forecast: its error first, a row per cell, and the assumptions of extrapolated cells."""
    table, notes = forecast_table(answer.cells)
    return Section("", [Sentences(answer_sentences(answer), plain_from=2), table, Lines(notes, "dim")])


CHECK_COLUMNS = ("cell", "forecast", "measured", "off", "inside", "largest error by term")


def check_section(checked: Sequence[CheckedForecast]) -> Section:
    """Forecast and measured times next to each other, with the term that has the largest error."""
    off = statistics.median(abs(row.error) for row in checked) if checked else math.nan
    inside = sum(row.inside for row in checked)
    head = f"Checked: median {error_share(off)} off; {inside} of {len(checked)} inside their intervals."
    rows = []
    for row in checked:
        term, seconds = max(row.terms.items(), key=lambda item: abs(item[1]), default=("", 0.0))
        rows.append(
            (
                row.name,
                duration(row.forecast_s),
                duration(row.measured_s),
                f"{100 * row.error:+.1f} %",
                "yes" if row.inside else "no",
                f"{TERM_NAMES.get(term, term)} {1e3 * seconds:+.2f} ms" if term else "",
            )
        )
    table = text_table(CHECK_COLUMNS, rows, wrapped=("cell", "largest error by term"))
    return Section("", [Sentences([head]), table])


def forecast_document(answer: Answer, checked: Sequence[CheckedForecast] | None) -> ForecastDocument:
    """Return the document of a forecast, with the check of its cells if there was one."""
    return view(ForecastDocument, answer, check=checked)


RANK_COLUMNS = ("cell", "GPUs", "time", "gain", "tokens/s", "a GPU", "link", "cost", "waits for")


def ranks_section(answer: RanksDocument) -> Section:
    """The gain of more GPUs: a sentence, a table of every cell by number of GPUs, and where there is no gain."""
    setting = [
        f"Forecast: {answer.model} ({answer.precision}) on {answer.on}, {answer.how}.",
        f"Error, on one GPU: {error_sentence(answer.error)}.",
        *answer.links,
    ]
    rows = rank_rows(answer.cells, priced=bool(answer.price))
    cost = "USD/M tok" if answer.price else "GPU-s/M tok"
    headings = [cost if name == "cost" else name for name in RANK_COLUMNS]
    blocks = [
        Sentences([answer.sentence]),
        Lines(setting),
        text_table(headings, rows, wrapped=("cell", "waits for")),
        Lines(worse_lines(answer.cells)),
        Lines([f"{TIGHT}."] if any(time.tight for cell in answer.cells for time in cell.times) else []),
        Lines([note for note in (answer.price, *answer.notes) if note], "dim"),
    ]
    return Section("", blocks)


def rank_rows(cells: Sequence[RankRow], *, priced: bool) -> list[tuple[str, ...]]:
    """One row per cell and number of GPUs."""
    rows = []
    for cell in cells:
        for number, time in enumerate(cell.times):
            rows.append((cell.name if number == 0 else "", str(time.ranks), *_figures(time, priced)))
    return rows


def _figures(time: RankTimeRow, priced: bool) -> tuple[str, ...]:
    if time.gain is None:
        return ("no room", "-", "-", "-", "-", "-", "memory full")
    cost = time.usd_per_million if priced and time.usd_per_million is not None else time.card_s_per_million
    return (
        duration(time.latency_s),
        f"{time.gain:.2f}x",
        significant(time.tokens_per_s),
        significant(time.tokens_per_s / time.ranks),
        percent(time.link_s / time.latency_s) if time.ranks > 1 else "-",
        significant(cost),
        waits_for(time.regime, time.tight),
    )


def worse_lines(cells: Sequence[RankRow]) -> list[str]:
    """For each number of GPUs from which cells get no faster, one line that names the cells."""
    cells_by_ranks: dict[int, list[str]] = {}
    compared = [cell for cell in cells if sum(time.fits for time in cell.times) > 1]
    for cell in compared:
        if cell.worse_from is not None:
            cells_by_ranks.setdefault(cell.worse_from, []).append(cell.name)
    if compared and not cells_by_ranks:
        which = "Every cell" if len(compared) == len(cells) else "Every cell that fits two of these numbers"
        return [f"{which} gets faster with each larger number of GPUs."]
    return [f"No faster from {ranks} GPUs on: {', '.join(names)}." for ranks, names in sorted(cells_by_ranks.items())]
