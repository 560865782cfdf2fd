"""Precisions of one model, compared cell by cell: sentences and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from profiler.effort import STANDARD
from profiler.judge.precisions import PrecisionDifference, clear_differences, compare_with_first, precision_sentences
from profiler.report.sections import quality_line, regime_names
from profiler.report.selection import of_phase
from profiler.stats import CLAIM_VISITS
from profiler.store.folder import Run
from profiler.units import duration, scaled, significant

PRECISION_COLUMNS = ("precision", "in", "memory", "saved", "decode", "dequantising", "tok/s", "regime")
AGAINST_COLUMNS = ("cell", "precision", "time", "speed-up", "interval")
# Each visit begins with a warm-up prefill.
_PREFILLS = 2
# Budgets are rounded to this many seconds, since the duration of a visit is known no better.
_BUDGET_STEP_S = 10
# Before the visits, and the visits themselves.
_STAGES = (("roofs", "dispatch"), ("timing",))


def precision_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row per precision: its memory and its time of the smallest decode step, in the order of the columns."""
    base = runs[0].model.storage_bytes
    return [
        [
            run.model.quant,
            run.model.dtype,
            scaled(run.model.storage_bytes, "B"),
            scaled(base - run.model.storage_bytes, "B") if base > run.model.storage_bytes else "-",
            *_first_decode(run),
        ]
        for run in runs
    ]


def warnings_of(runs: Sequence[Run]) -> list[str]:
    """Return each warning of the runs once, with the precisions that it concerns unless it concerns all."""
    said: dict[str, list[str]] = {}
    for run in runs:
        for warning in run.document.warnings:
            said.setdefault(warning, []).append(run.model.quant)
    return [text if len(of) == len(runs) else f"{', '.join(of)}: {text}" for text, of in said.items()]


def _first_decode(run: Run) -> list[str]:
    decodes = of_phase(run.measured, "decode")
    if not decodes:
        return ["-"] * 4
    first = decodes[0]
    return [
        duration(first.latency_s),
        duration(first.dequantise_s) if first.dequantise_s else "-",
        significant(first.tokens_per_s),
        regime_names(run).get(first.key, "-"),
    ]


def difference_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row per cell that compares a further precision with the first, in the order of the columns."""
    return _rows(_against(runs))


def clear_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return the clearest differences, as many as fit on a screen."""
    return _rows(clear_differences(_against(runs)))


def once_line(runs: Sequence[Run]) -> str | None:
    """Return a line with the number of cells visited once, and the budget that visits each often enough for a claim."""
    items = compare_with_first(runs)
    if not (once := sum(item.visited_once for item in items)):
        return None
    line = f"{once} of {len(items)} cells rest on one visit, no claim"
    needed_s = [_claims_s(run) for run in runs]
    if not all(needed_s):
        return line
    budget_s = math.ceil(sum(needed_s) / _BUDGET_STEP_S) * _BUDGET_STEP_S
    return f"{line}; with --budget {budget_s} for all of them each would be visited about twice"


def _claims_s(run: Run) -> float:
    """Return the budget with which this run would have visited every cell often enough for a claim.

    It is computed from the duration of the visits, each of which had the same share of what the sweep took besides, and
    of the stages before them; 0 if the run has no number of visits or no durations.
    """
    done_s = needed_s = 0.0
    for row in run.measured:
        visit_s = row.latency_s * (_PREFILLS if row.phase == "prefill" else row.key.cell.decode_steps)
        done_s += visit_s * (row.visits or 0)
        needed_s += visit_s * max(CLAIM_VISITS, row.visits or 0)
    before_s, sweep_s = (sum(run.document.stage_s.get(name, 0.0) for name in names) for names in _STAGES)
    if not done_s or not sweep_s:
        return 0.0
    return (before_s + needed_s / done_s * sweep_s) / STANDARD.visits_share


def _against(runs: Sequence[Run]) -> list[PrecisionDifference]:
    order = {run.model.quant: number for number, run in enumerate(runs)}
    return sorted(compare_with_first(runs), key=lambda item: (item.key.phase, order[item.precision], item.key))


def _rows(items: Sequence[PrecisionDifference]) -> list[list[str]]:
    return [
        [
            item.key.name,
            item.precision,
            duration(item.time_s),
            f"{item.speed_up:.2f}x",
            "one visit: no claim" if item.visited_once else f"{item.low:.2f} .. {item.high:.2f}",
        ]
        for item in items
    ]


_WORDS = ("cell", "precision", "regime")


def print_comparison(runs: Sequence[Run], console: Console) -> None:
    """Print runs of one model in several precisions, each compared with the first."""
    console.print()
    for sentence in precision_sentences(runs):
        console.print(Text(sentence, style="bold"))
    console.print()
    console.print(Text(f"{runs[0].model.id} on {runs[0].document.device.name}"))
    console.print(_table(PRECISION_COLUMNS, precision_rows(runs)))
    shown, every = clear_rows(runs), difference_rows(runs)
    console.print()
    console.print(_table(AGAINST_COLUMNS, shown))
    if len(shown) < len(every):
        console.print(
            Text(f"the fastest and the slowest of each; all {len(every)}: {runs[0].folder.parent / 'report.html'}")
        )
    if once := once_line(runs):
        console.print(Text(once))
    for run in runs:
        if quality := quality_line(run):
            console.print(Text(f"{run.model.quant} {quality}"))
    for warning in warnings_of(runs):
        console.print(Text(f"! {warning}", style="yellow"))
    for run in runs:
        console.print(Text(f"run: {run.folder}", style="dim"))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
