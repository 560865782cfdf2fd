"""Print a forecast over the number of GPUs, or give it as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from profiler.forecast.tensor_parallel import RankCell, RanksAnswer, RankTime
from profiler.report.blocks import Lines, Sentences, text_table
from profiler.report.forecast import error_sentence
from profiler.report.terminal import print_blocks
from profiler.units import duration, percent, significant

RANK_COLUMNS = ("cell", "cards", "time", "gain", "tokens/s", "a card", "link", "cost", "waits for")


def print_ranks(answer: RanksAnswer, card: str, console: Console) -> None:
    """Print the gain of more GPUs: a sentence, a table of every cell by number of GPUs, and where there is no gain."""
    setting = [
        f"Forecast: {answer.model} ({answer.precision}) on {answer.on}, {answer.how}.",
        f"Error, on one GPU: {error_sentence(answer.error)}.",
        *answer.links,
    ]
    rows = rank_rows(answer.cells, priced=bool(answer.price))
    blocks = [
        Sentences([answer.sentence(card)]),
        Lines(setting),
        text_table(_columns(answer), rows, wrapped=("cell", "waits for")),
        Lines(worse_lines(answer.cells)),
        Lines([note for note in (answer.price, *answer.notes) if note], "dim"),
    ]
    print_blocks(blocks, console)


def _columns(answer: RanksAnswer) -> tuple[str, ...]:
    return tuple(("USD/M tok" if answer.price else "card-s/M tok") if name == "cost" else name for name in RANK_COLUMNS)


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
        time.regime.removesuffix("-bound"),
    )


def worse_lines(cells: Sequence[RankCell]) -> list[str]:
    """For each number of GPUs from which cells get no faster, one line that names the cells."""
    cells_by_ranks: dict[int, list[str]] = {}
    for cell in cells:
        if cell.worse_from is not None:
            cells_by_ranks.setdefault(cell.worse_from, []).append(cell.name)
    if not cells_by_ranks:
        return ["Every cell gets faster with each larger number of cards."]
    return [f"No faster from {ranks} cards on: {', '.join(names)}." for ranks, names in sorted(cells_by_ranks.items())]


def ranks_json(answer: RanksAnswer, card: str) -> dict[str, object]:
    """The document of `roofscope forecast --tp --format json`."""
    cells = [
        {
            "phase": cell.phase,
            "batch_size": cell.batch_size,
            "prompt_len": cell.prompt_len,
            "context_len": cell.context_len,
            "worse_from": cell.worse_from,
            "times": [
                {
                    **asdict(time),
                    "gain": cell.gain(time) if time.fits and cell.base else None,
                    "card_s_per_million": time.card_s_per_million,
                }
                for time in cell.times
            ],
        }
        for cell in answer.cells
    ]
    return {
        "source": answer.source,
        "model": answer.model,
        "precision": answer.precision,
        "on": answer.on,
        "how": answer.how,
        "sentence": answer.sentence(card),
        "link": answer.link,
        "links": list(answer.links),
        "price": answer.price,
        "error": asdict(answer.error),
        "cells": cells,
        "notes": list(answer.notes),
    }
