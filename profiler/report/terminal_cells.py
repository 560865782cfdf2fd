"""The cells and time breakdowns of a run on a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from profiler.grid.cells import CellKey
from profiler.judge.breakdown import TERMS
from profiler.judge.cells import CellResult
from profiler.report.blocks import BreakdownChart, CellsTable, TextTable, text_table
from profiler.report.breakdown_bars import WORTH_SHOWING, BreakdownBar, breakdown_bars, terms_of
from profiler.report.columns import columns_with_values
from profiler.report.selection import evidence_of, half_width, of_first_engine
from profiler.report.sentences import common_noise_line, own_noise, regime_names, visited_once
from profiler.report.terminal import print_block, rich_table
from profiler.store.folder import Run
from profiler.units import percent

_BAR_WIDTH = 48
_UNBOUNDED = 1000
_MOST_BARS_A_PHASE = 8
_BLOCK = "█"
_TITLE, _SHARES = "where the time goes", "share of the time"
_SHORT_CONFIDENCE = {"high": "high", "medium": "med", "low": "low", None: ""}


@print_block.register
def _(block: CellsTable, console: Console) -> None:
    console.print(rich_table(cells_table(block.run, console)))
    for note in _cell_notes(block.run):
        console.print(Text(note, style="dim"))


@print_block.register
def _(block: BreakdownChart, console: Console) -> None:
    if not (bars := printed_bars(block.run)):
        return
    if not console.color_system or console.no_color or not console.encoding.startswith("utf"):
        console.print(rich_table(shares_table(bars)))
        return
    console.print(Text(f"{_TITLE}: ").append(bar_legend(bars)))
    widest = max(len(bar.name) for bar in bars)
    for bar in bars:
        console.print(Text(f"{bar.name:<{widest}} ").append(bar_text(bar)).append(f" {bar.below_zero}"))


# The columns that a narrow terminal omits first: the others imply them.
_FIRST_TO_GO = ("TFLOP/s", "GB/s", "tok/s", "MFU", "MBU")


def cells_table(run: Run, console: Console) -> TextTable:
    """Return a row per cell; columns are omitted before any is cut to the console's width."""
    unbounded = console.options.update(max_width=_UNBOUNDED)
    table = _cells_table(run, ())
    for number in range(1, len(_FIRST_TO_GO) + 1):
        if console.measure(rich_table(table), options=unbounded).maximum <= console.width:
            break
        table = _cells_table(run, _FIRST_TO_GO[:number])
    return table


def _cells_table(run: Run, omitted: Sequence[str]) -> TextTable:
    results, words = run.results, regime_names(run)
    noisy, once = _noisy(run), visited_once(run)
    columns = [column for column in columns_with_values(results, "terminal") if column.heading not in omitted]
    # A cell without a verdict has its status in place of one, so these have a text in every run.
    headings = list(dict.fromkeys([*(column.heading for column in columns), "regime", "sure"]))
    rows = []
    for result in results:
        texts = {column.heading: column.entry(result).text for column in columns}
        if result.status == "ok":
            mark = "*" if result.key in once else "~" if result.key in noisy else ""
            judged = words.get(result.key, ""), _SHORT_CONFIDENCE[result.confidence]
            texts |= {"±": _interval(result, mark)}
        else:
            judged = f"({result.status})", ""
            texts |= {"±": _interval(result, "±")} if result.status == "forecast" else {}
        texts |= dict(zip(("regime", "sure"), judged, strict=True))
        rows.append([texts[heading] for heading in headings])
    starts = [number for number, result in enumerate(results) if number and result.phase != results[number - 1].phase]
    return text_table(headings, rows, texts=("engine", "regime", "sure"), groups=starts)


def _noisy(run: Run) -> set[CellKey]:
    """Return the cells that are noisier than the rest of the run, for another reason than all cells share."""
    own, evidence = own_noise(run), evidence_of(run)
    return {
        result.key
        for result in run.measured
        if result.noise != "quiet"
        and (result.key in own or not (result.key in evidence and evidence[result.key].noise_reasons))
    }


def _interval(result: CellResult, mark: str) -> str:
    width = half_width(result)
    if math.isnan(width):
        return "n=1"
    return f"{mark}{100 * width:.1f} %" if width < 0.1 else f"{mark}{percent(width)}"


def _cell_notes(run: Run) -> list[str]:
    """Return the meanings of the marks in the table, and the noise that all cells share."""
    notes = []
    if forecasts := sum(result.status == "forecast" for result in run.results):
        of_all = f"{forecasts} of {len(run.results)} rows"
        notes.append(f"(forecast): {of_all} are estimated from the measured ones, since --budget ended first")
    if visited_once(run):
        notes.append("* visited once: ± is within that visit; a larger --budget gives more visits")
    common = common_noise_line(run)
    return [*notes, common] if common else notes


def printed_bars(run: Run) -> list[BreakdownBar]:
    """Return bars of the first engine's cells, at most `_MOST_BARS_A_PHASE` per phase, from the first to the last."""
    return breakdown_bars(of_first_engine(run), _MOST_BARS_A_PHASE)


def shares_table(bars: Sequence[BreakdownBar]) -> TextTable:
    """Return the terms of each cell with their shares, the largest first: the bars of a screen without colours."""
    rows = []
    for bar in bars:
        shown = [segment for segment in bar.segments if abs(segment.share) >= WORTH_SHOWING]
        ranked = sorted(shown, key=lambda segment: -abs(segment.share))
        words = [f"{TERMS[segment.term].short} {percent(segment.share)}" for segment in ranked]
        rows.append([bar.name, ", ".join(words)])
    return text_table((_TITLE, _SHARES), rows, wrapped=(_SHARES,))


def bar_legend(bars: Sequence[BreakdownBar]) -> Text:
    """Return the coloured blocks of these bars with their meanings."""
    legend = Text()
    for term in terms_of(bars):
        shown = TERMS[term]
        legend.append(", " if legend else "").append(_BLOCK, style=shown.screen_color).append(f" {shown.name}")
    return legend


def bar_text(bar: BreakdownBar) -> Text:
    """Return a bar of coloured blocks, as many per term as its share of the positive terms.

    Rounded edges keep the bar full.
    """
    whole = max((segment.end for segment in bar.segments if segment.share > 0), default=1.0)
    text = Text()
    for segment in bar.segments:
        if segment.share > 0:
            start, end = (round(_BAR_WIDTH * at / whole) for at in (segment.start, segment.end))
            text.append(_BLOCK * (end - start), style=TERMS[segment.term].screen_color)
    return text
