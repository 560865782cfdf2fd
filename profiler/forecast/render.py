"""Print a forecast over the number of GPUs, or give it as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from profiler.counting.floor import TIGHT
from profiler.forecast.tensor_parallel import RankCell, RanksAnswer, RankTime
from profiler.json_document import Document, view
from profiler.predict.result import ForecastError, StepShape
from profiler.report.blocks import Lines, Sentences, text_table
from profiler.report.forecast import error_sentence, waits_for
from profiler.report.terminal import print_blocks
from profiler.units import duration, percent, significant

RANK_COLUMNS = ("cell", "GPUs", "time", "gain", "tokens/s", "a GPU", "link", "cost", "waits for")


def print_ranks(answer: RanksAnswer, card: str, console: Console) -> None:
    """Print the gain of more GPUs: a sentence, a table of every cell by number of GPUs, and where there is no gain."""
    setting = [
        f"Forecast: {answer.model} ({answer.precision}) on {answer.on}, {answer.how}.",
        f"Error, on one GPU: {error_sentence(answer.error)}.",
        *answer.links,
    ]
    rows = rank_rows(answer.cells, priced=bool(answer.price))
    cost = "USD/M tok" if answer.price else "GPU-s/M tok"
    headings = [cost if name == "cost" else name for name in RANK_COLUMNS]
    blocks = [
        Sentences([answer.sentence(card)]),
        Lines(setting),
        text_table(headings, rows, wrapped=("cell", "waits for")),
        Lines(worse_lines(answer.cells)),
        Lines([f"{TIGHT}."] if any(time.tight for cell in answer.cells for time in cell.times) else []),
        Lines([note for note in (answer.price, *answer.notes) if note], "dim"),
    ]
    print_blocks(blocks, console)


def rank_rows(cells: Sequence[RankCell], *, priced: bool) -> list[tuple[str, ...]]:
    """One row per cell and number of GPUs."""
    rows = []
    for cell in cells:
        for number, time in enumerate(cell.times):
            rows.append((cell.name if number == 0 else "", str(time.ranks), *_figures(cell, time, priced)))
    return rows


def _figures(cell: RankCell, time: RankTime, priced: bool) -> tuple[str, ...]:
    if not time.fits:
        return ("no room", "-", "-", "-", "-", "-", "memory full")
    cost = time.usd_per_million if priced and time.usd_per_million is not None else time.card_s_per_million
    return (
        duration(time.latency_s),
        f"{cell.gain(time):.2f}x",
        significant(time.tokens_per_s),
        significant(time.tokens_per_s / time.ranks),
        percent(time.link_s / time.latency_s) if time.ranks > 1 else "-",
        significant(cost),
        waits_for(time.regime, time.tight),
    )


def worse_lines(cells: Sequence[RankCell]) -> list[str]:
    """For each number of GPUs from which cells get no faster, one line that names the cells."""
    cells_by_ranks: dict[int, list[str]] = {}
    for cell in cells:
        if cell.worse_from is not None:
            cells_by_ranks.setdefault(cell.worse_from, []).append(cell.name)
    if not cells_by_ranks:
        return ["Every cell gets faster with each larger number of GPUs."]
    return [f"No faster from {ranks} GPUs on: {', '.join(names)}." for ranks, names in sorted(cells_by_ranks.items())]


@dataclass(frozen=True)
class RankTimeRow:
    """The forecast of a step on a number of GPUs."""

    ranks: int
    latency_s: float
    low_s: float
    high_s: float
    """`low_s` and `high_s` are the ends of the 90 % interval."""
    link_s: float
    """The part of `latency_s` that collectives take."""
    tokens_per_s: float
    regime: str
    fits: bool
    tight: bool
    """Whether the step fits, but runs out of memory if free memory is in pieces."""
    usd_per_million: float | None
    """USD per million tokens at this batch, for all GPUs; null without a price."""
    gain: float | None
    """Speed relative to the fewest GPUs that the step fits; null where it does not fit."""
    card_s_per_million: float
    """GPU seconds per million tokens, summed over all GPUs."""


@dataclass(frozen=True)
class RankRow(StepShape):
    """One step by number of GPUs."""

    worse_from: int | None
    """The fewest GPUs on which the step is no faster than on the number before; null if it is always faster."""
    times: Sequence[RankTimeRow]


@dataclass(frozen=True)
class RanksDocument(Document):
    """`roofscope forecast --tp --format json`."""

    source: str
    model: str
    precision: str
    on: str
    how: str
    sentence: str
    link: str
    links: Sequence[str]
    price: str
    error: ForecastError
    cells: Sequence[RankRow]
    notes: Sequence[str]


def ranks_document(answer: RanksAnswer, card: str) -> RanksDocument:
    """Return the document of a forecast over the number of GPUs."""
    return view(RanksDocument, answer, sentence=answer.sentence(card), cells=[_rank_row(cell) for cell in answer.cells])


def _rank_row(cell: RankCell) -> RankRow:
    gains = [cell.gain(time) if time.fits and cell.base else None for time in cell.times]
    times = [view(RankTimeRow, time, gain=gain) for time, gain in zip(cell.times, gains, strict=True)]
    return view(RankRow, cell, times=times)
