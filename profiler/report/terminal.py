"""The screen after a run: the answer, the roofs, one table, the warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from profiler.grid.cells import CellKey
from profiler.judge.breakdown import TERM_NAMES
from profiler.judge.cells import CellResult
from profiler.report.breakdown_bars import BreakdownBar, breakdown_bars, terms_of
from profiler.report.execution import RAN_COLUMNS, ran_rows, trial_cell
from profiler.report.optional_sections import cold_lines, generate_lines, ragged_lines
from profiler.report.sections import (
    activity_lines,
    common_noise_line,
    engine_lines,
    host_line,
    instrument_line,
    own_noise,
    precision_line,
    quality_line,
    rank_lines,
    regime_names,
    roofs_lines,
    stage_line,
    unexplained_lines,
    visited_once,
)
from profiler.report.selection import evidence_of, half_width, of_first_engine
from profiler.report.tables import module_time_rows
from profiler.store.folder import Run
from profiler.units import duration, percent, short_count, significant

_BAR_WIDTH = 48
_UNBOUNDED = 1000
_MOST_BARS_A_PHASE = 8
# A letter and a colour each, so that the bars read the same without colours.
_BAR_STYLE = {
    "weights_s": ("w", "blue"),
    "kv_s": ("v", "cyan"),
    "compute_s": ("a", "yellow"),
    "dequantise_s": ("q", "green"),
    "kernel_s": ("k", "red"),
    "avoidable_s": ("x", "bright_yellow"),
    "padding_s": ("p", "bright_red"),
    "link_s": ("l", "default"),
    "dispatch_s": ("d", "magenta"),
    "generate_s": ("g", "bright_magenta"),
    "engine_s": ("e", "bright_cyan"),
    "unexplained_s": ("?", "bright_black"),
}
_SHORT_CONFIDENCE = {"high": "high", "medium": "med", "low": "low", None: ""}


def print_run(run: Run, console: Console) -> None:
    """Print a run to the terminal."""
    console.print()
    for sentence in run.answer:
        console.print(Text(sentence, style="bold"))
    console.print()
    model = run.model
    heading = (
        f"{model.id}: {short_count(model.params)} parameters, {precision_line(run)}, on {run.document.device.name}"
    )
    console.print(Text(heading))
    console.print(Text("measured roofs: " + ", ".join(roofs_lines(run))))
    if host := host_line(run):
        console.print(Text(host, style="dim"))
    console.print(terminal_table(run, console))
    if any(result.status == "forecast" for result in run.results):
        console.print(Text("(forecast): from the measured cells, since --budget did not reach it", style="dim"))
    if visited_once(run):
        console.print(Text("* visited once: ± is within the visit; --budget gives more", style="dim"))
    if common := common_noise_line(run):
        console.print(Text(common, style="dim"))
    _print_bars(run, console)
    console.print(_ran_table(run))
    if run.document.breakdown:
        console.print()
        console.print(breakdown_table(run))
    for line in (
        *activity_lines(run),
        *unexplained_lines(run),
        *engine_lines(run),
        *generate_lines(run),
        *ragged_lines(run),
        *cold_lines(run),
        *rank_lines(run),
    ):
        console.print(Text(line))
    if quality := quality_line(run):
        console.print(Text(quality))
    console.print(Text(instrument_line(run), style="dim"))
    if stages := stage_line(run):
        console.print(Text(stages, style="dim"))
    for warning in run.document.warnings:
        console.print(Text(f"! {warning}", style="yellow"))
    console.print(Text(f"run: {run.folder}", style="dim"))


def _ran_table(run: Run) -> Table:
    """What really ran, and what was tried in its place."""
    cell = trial_cell(run)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (*RAN_COLUMNS[:2], f"{RAN_COLUMNS[2]} at {cell}" if cell else ""):
        table.add_column(name, overflow="fold")
    for row in ran_rows(run):
        table.add_row(*row)
    return table


@dataclass(frozen=True)
class _Columns:
    """Which columns a run's table has."""

    engines: bool
    datasheet: bool
    left_out: Sequence[str]

    def has(self, name: str) -> bool:
        return name not in self.left_out and (self.datasheet or name not in ("MFU", "MBU"))

    @property
    def padding(self) -> int:
        return 0 if self.datasheet or self.engines else 1


# What goes first where a screen is narrow: what the others repeat.
_FIRST_TO_GO = ("TFLOP/s", "GB/s", "tok/s", "MFU", "MBU")


def terminal_table(run: Run, console: Console) -> Table:
    """Every cell as a rich table; columns are left out before any is cut to the console's width."""
    unbounded = console.options.update(max_width=_UNBOUNDED)
    table = Table()
    for number in range(len(_FIRST_TO_GO) + 1):
        table = _table(run, _FIRST_TO_GO[:number])
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
    return table


def _table(run: Run, left_out: Sequence[str]) -> Table:
    columns = _Columns(
        engines=len({result.engine for result in run.results}) > 1,
        datasheet=any(not (math.isnan(result.mfu) and math.isnan(result.mbu)) for result in run.results),
        left_out=left_out,
    )
    table = _empty_table(columns)
    words, noisy, once = regime_names(run), _noisy(run), visited_once(run)
    last_phase = None
    for result in run.results:
        if last_phase is not None and result.phase != last_phase:
            table.add_section()
        last_phase = result.phase
        mark = "*" if result.key in once else "~" if result.key in noisy else ""
        table.add_row(*_row(result, words.get(result.key, ""), columns, mark))
    return table


def _noisy(run: Run) -> set[CellKey]:
    """Cells that are noisier than the rest of the run: what all cells share marks none of them."""
    own, told = own_noise(run), evidence_of(run)
    return {
        result.key
        for result in run.measured
        if result.noise != "quiet"
        and (result.key in own or not (result.key in told and told[result.key].noise_reasons))
    }


def _empty_table(columns: _Columns) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, columns.padding, 0, 0))
    for name in ("phase", *(["engine"] if columns.engines else [])):
        table.add_column(name, no_wrap=True)
    numbers = ("batch", "tokens", "time", "±", "tok/s", "TFLOP/s", "GB/s")
    for name in (*filter(columns.has, (*numbers, "MFU", "MBU")), "roof"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("regime", "sure"):
        table.add_column(name, no_wrap=True)
    return table


def _row(result: CellResult, regime: str, columns: _Columns, mark: str) -> list[str]:
    engine = [result.engine] if columns.engines else []
    head = [result.phase, *engine, str(result.batch_size), str(result.key.cell.depth)]
    repeated = {
        "tok/s": significant(result.tokens_per_s),
        "TFLOP/s": significant(result.flops_per_s / 1e12),
        "GB/s": significant(result.bytes_per_s / 1e9),
        "MFU": _share(result.mfu),
        "MBU": _share(result.mbu),
    }
    told = [text for name, text in repeated.items() if columns.has(name)]
    if result.status != "ok":
        dashes = ["-"] * (3 + len(told))
        if result.status == "forecast":
            dashes[:3] = [duration(result.latency_s), _interval(result, "±"), significant(result.tokens_per_s)]
        return [*head, *dashes, f"({result.status})", ""]
    return [
        *head,
        duration(result.latency_s),
        _interval(result, mark),
        *told,
        _share(result.attained),
        regime,
        _SHORT_CONFIDENCE[result.confidence],
    ]


def _interval(result: CellResult, mark: str) -> str:
    width = half_width(result)
    return "n=1" if math.isnan(width) else f"{mark}{100 * width:.1f}%"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else percent(value)


def breakdown_table(run: Run) -> Table:
    """Where the time inside a step goes: for the smallest and the largest cell of each phase."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("inside", no_wrap=True)
    for name in ("time", "share", "TFLOP/s", "GB/s", "FLOP/byte", "roof"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in module_time_rows(run):
        if not row[0].startswith(" ") and table.row_count:
            table.add_section()
        table.add_row(*row)
    return table


def _print_bars(run: Run, console: Console) -> None:
    bars = printed_bars(run)
    if not bars:
        return
    console.print()
    console.print(Text(f"where the time goes: {bar_legend(bars)}"))
    widest = max(len(bar.name) for bar in bars)
    for bar in bars:
        console.print(Text(f"{bar.name:<{widest}} ").append(letters(bar)).append(f" {bar.below_zero}"))
    console.print()


def printed_bars(run: Run) -> list[BreakdownBar]:
    """The first engine's cells, of many those that span them."""
    return breakdown_bars(of_first_engine(run), _MOST_BARS_A_PHASE)


def bar_legend(bars: Sequence[BreakdownBar]) -> str:
    """What the letters of these bars stand for."""
    return ", ".join(f"{_BAR_STYLE[term][0]} {TERM_NAMES[term]}" for term in terms_of(bars))


def letters(bar: BreakdownBar) -> Text:
    """As many letters as a term's share of the positive terms; edges are rounded, so that the bar is always full."""
    whole = max((segment.end for segment in bar.segments if segment.share > 0), default=1.0)
    text = Text()
    for segment in bar.segments:
        letter, color = _BAR_STYLE[segment.term]
        if segment.share > 0:
            start, end = (round(_BAR_WIDTH * at / whole) for at in (segment.start, segment.end))
            text.append(letter * (end - start), style=color)
    return text
