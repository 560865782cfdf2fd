"""Where the time goes: bars, terms, operators under the roof, modules, kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from profiler.grid.cells import PHASES, CellKey
from profiler.judge.breakdown import TERM_NAMES, TERMS
from profiler.judge.cells import CellEvidence, CellResult
from profiler.judge.module_times import GroupTime
from profiler.report.blocks import (
    DOCUMENTS,
    HTML,
    Block,
    BreakdownChart,
    Lines,
    Picture,
    Section,
    TextTable,
    text_table,
)
from profiler.report.roofline_data import group_points
from profiler.report.selection import evidence_of, of_first_engine, selected_cells, spanning
from profiler.report.terminal import print_block, rich_table
from profiler.store.document import ActivityRecord
from profiler.store.folder import Run
from profiler.units import duration, percent, several, significant

WORTH_SHOWING = 0.01
"""Share of a cell's time below which a term is not mentioned."""


@dataclass(frozen=True)
class Segment:
    """One term of a bar, in shares of the cell's time."""

    term: str
    share: float
    """Negative where a roof or a count is too low."""
    start: float
    """The left end of the segment; negative terms extend to the left of zero."""

    @property
    def name(self) -> str:
        return TERMS[self.term].name

    @property
    def end(self) -> float:
        return self.start + abs(self.share)

    @property
    def words(self) -> str:
        return f"{self.name} {100 * self.share:.1f} %"


@dataclass(frozen=True)
class BreakdownBar:
    """The time of one cell, divided into its terms."""

    result: CellResult
    segments: tuple[Segment, ...]

    @property
    def name(self) -> str:
        return self.result.key.name

    @property
    def below_zero(self) -> str:
        """Return the most negative term with its share, as text; empty without a negative term."""
        least = min(self.segments, key=lambda segment: segment.share)
        return f"{least.name} {percent(least.share)}" if least.share <= -WORTH_SHOWING else ""


def breakdown_bars(results: Sequence[CellResult], most_a_phase: int) -> list[BreakdownBar]:
    """Return a bar per measured cell, at most `most_a_phase` per phase, evenly picked from the first to the last.

    Cells whose terms add up to more than twice their time get none: the machine changed between the measurements.
    """
    drawable = [result for result in results if not result.unexplained_s < -result.latency_s]
    return [BreakdownBar(result, tuple(_segments(result))) for result in spanning(drawable, most_a_phase)]


def terms_of(bars: Sequence[BreakdownBar]) -> list[str]:
    """Return the terms that occur in any of these bars, in the order of TERMS."""
    shown = {segment.term for bar in bars for segment in bar.segments if abs(segment.share) > 0}
    return [term for term in TERMS if term in shown]


def _segments(result: CellResult) -> Iterator[Segment]:
    above = below = 0.0
    for term in TERMS:
        share = getattr(result, term) / result.latency_s
        if share < 0:
            below += share
            yield Segment(term, share, below)
        else:
            yield Segment(term, share, above)
            above += share


def breakdown(run: Run) -> Section | None:
    blocks: list[Block] = [BreakdownChart(run)]
    note = "from the operators' roofs, replayed kernels and measured dispatch"
    return Section("Where the time goes", blocks, note) if run.measured else None


_BAR_WIDTH = 48
_MOST_BARS_A_PHASE = 8
_BLOCK = "█"
_TITLE, _SHARES = "where the time goes", "share of the time"


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


def terms(run: Run) -> Section | None:
    rows = breakdown_rows(run)
    caption = "each term, with half of its 95 % interval"
    table = text_table(rows[0], rows[1:], caption=caption) if rows else None
    return Section("", [table], media=DOCUMENTS) if table else None


def breakdown_rows(run: Run) -> list[list[str]]:
    """Return the time breakdown of the cells of `selected_cells`: a heading, then a row per term with half-widths."""
    evidence, shown = evidence_of(run), selected_cells(run)
    if not shown:
        return []
    rows = [["", *(result.key.name for result in shown)]]
    rows.append(["measured", *(duration(result.latency_s) for result in shown)])
    return rows + [
        [name, *(_term(term, result, evidence.get(result.key)) for result in shown)]
        for term, name in TERM_NAMES.items()
        if any(getattr(result, term) for result in shown)
    ]


def _term(term: str, result: CellResult, evidence: CellEvidence | None) -> str:
    off_s = evidence.split_half_widths_s.get(term, 0.0) if evidence else 0.0
    text = duration(getattr(result, term))
    return f"{text} ± {duration(off_s)}" if off_s else text


def operators(run: Run) -> Section | None:
    if not group_points(run):
        return None
    alt = "Operator groups under the measured roof; the area of a point is its share of the step"
    note = "replayed kernels, counted work; the smallest and the largest cell of each phase"
    return Section("Operators under the roof", [Picture("operators", alt, (run,))], note, HTML)


def inside(run: Run) -> Section | None:
    rows = module_time_rows(run)
    headings = ("inside", "time", "share", "TFLOP/s", "GB/s", "FLOP/byte", "roof")
    groups = [number for number, row in enumerate(rows) if not row[0].startswith(" ")]
    table = text_table(headings, rows, groups=groups)
    return Section("Inside a step", [table], "measured with hooks, in a separate pass") if rows else None


def module_time_rows(run: Run) -> list[list[str]]:
    """Return a row per step and one per module group in it, for the smallest and the largest cell of each phase."""
    groups: dict[CellKey, list[GroupTime]] = {}
    for item in run.document.breakdown:
        groups.setdefault(item.key, []).append(item)
    results, rows = run.by_key(), []
    for phase in PHASES:
        keys = sorted(
            (key for key in groups if key.phase == phase), key=lambda key: key.cell.batch_size * key.cell.depth
        )
        for key in dict.fromkeys([*keys[:1], *keys[-1:]]):
            step_s, own_s = groups[key][0].step_s, results[key].latency_s
            rows.append([key.name, duration(step_s), f"hooks {100 * (step_s / own_s - 1):+.1f} %", *[""] * 4])
            rows += [_inside_row(item) for item in groups[key]]
    return rows


def _inside_row(item: GroupTime) -> list[str]:
    rates = ["-"] * 4
    if item.bytes and item.time_s:
        rates = [
            significant(item.flops / item.time_s / 1e12),
            significant(item.bytes / item.time_s / 1e9),
            significant(item.flops / item.bytes),
            percent(item.roof_s / item.time_s),
        ]
    return [f"  {item.group.replace('_', ' ')}", duration(item.time_s), percent(item.share), *rates]


def activity(run: Run) -> Section | None:
    lines = [*activity_lines(run), *unexplained_lines(run)]
    title, note = "Kernels, gaps and unexplained time", "measured in separate passes"
    return Section(title, [Lines(lines)], note) if lines else None


def activity_lines(run: Run) -> list[str]:
    """Return kernels, gaps and busy share of the traced steps, and on CUDA the commands of nsys and ncu."""
    document = run.document
    on_cuda = document.device.kind == "cuda"
    what = "kernels" if on_cuda else "operators"
    lines = [
        f"{item.key.name}: {item.kernels} {what}{_of_median(item)}, one of them running"
        f" {percent(item.busy_share)} of the time;"
        f" {item.gaps} gaps of {duration(item.gap_s / item.gaps) if item.gaps else '0'} on average"
        for item in document.activity
    ]
    lines += [
        f"longest in {item.key.name}: "
        + ", ".join(f"{kernel.name} {duration(kernel.seconds)} in {kernel.calls}" for kernel in item.longest)
        for item in document.activity
        if item.longest
    ]
    lines += [f"{name}: {breaks} graph breaks" for name, breaks in document.engine.graph_breaks.items()]
    lines += [
        f"{name}: {several(skips, 'compiled piece runs', 'compiled pieces run')} without a CUDA graph"
        for name, skips in document.engine.graph_skips.items()
        if skips
    ]
    if lines and on_cuda:
        command = f"{document.command} --breakdown"
        lines.append(f"with NVTX ranges per group: nsys profile --trace=cuda,nvtx -o step {command}")
        lines.append(
            "bytes per kernel: ncu --nvtx --metrics dram__bytes_read.sum,dram__bytes_write.sum --clock-control none"
            f" {command}"
        )
    return lines


def _of_median(item: ActivityRecord) -> str:
    return "" if item.median_s is None else f" of {duration(item.median_s)} in the median"


def unexplained_lines(run: Run) -> list[str]:
    """Return a line per cell with much unexplained time: its share, and the two operator groups with most of it."""
    results, lines = run.by_key(), []
    for item in run.document.evidence:
        if item.unexplained_in_s:
            result = results[item.key]
            most = [
                f"{group.replace('_', ' ')} ({duration(excess_s)})"
                for group, excess_s in list(item.unexplained_in_s.items())[:2]
            ]
            lines.append(
                f"{item.key.name}: {percent(result.unexplained_s / result.latency_s)} of its time is not explained;"
                f" timed with hooks, most of it is in {' and '.join(most)}"
            )
    return lines
