"""A forecast over the number of GPUs, on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from profiler.counting.floor import TIGHT
from profiler.forecast.tensor_parallel import RankRow, RanksDocument, RankTimeRow
from profiler.report.blocks import Lines, Section, Sentences, text_table
from profiler.report.conditions import error_sentence, waits_for
from profiler.units import duration, percent, significant

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
    for cell in cells:
        if cell.worse_from is not None:
            cells_by_ranks.setdefault(cell.worse_from, []).append(cell.name)
    if not cells_by_ranks:
        return ["Every cell gets faster with each larger number of GPUs."]
    return [f"No faster from {ranks} GPUs on: {', '.join(names)}." for ranks, names in sorted(cells_by_ranks.items())]
