"""Where the time goes: bars, terms, operators under the ceiling, modules, kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console
from rich.text import Text

from profiler.grid.cells import PHASES, CellKey
from profiler.judge.breakdown import TERM_NAMES, TERMS, Term
from profiler.judge.cells import CellResult
from profiler.judge.module_times import GroupTime
from profiler.report.blocks import FULL, HTML, BreakdownChart, Lines, Picture, Section, TextTable, evenly, text_table
from profiler.report.roofline_data import group_points
from profiler.report.selection import evidence_of, of_first_engine, selected_cells, spanning
from profiler.report.terminal import UnbrokenText, print_block, rich_table
from profiler.store.folder import Run
from profiler.units import duration, percent, several, significant

WORTH_SHOWING = 0.01
"""Share of a cell's time below which a term is not mentioned."""
MOST_BARS_A_PHASE = 8
"""Cells of a phase that a chart has at most."""


@dataclass(frozen=True)
class Segment:
    """One term of a bar, in shares of the cell's time."""

    term: Term
    share: float
    """Negative where a ceiling is too low or a count too high."""
    start: float
    """The left end of the segment; negative terms extend to the left of zero."""

    @property
    def words(self) -> str:
        return f"{self.term.short} {percent(self.share)}"

    @property
    def end(self) -> float:
        return self.start + abs(self.share)


@dataclass(frozen=True)
class BreakdownBar:
    """The time of one cell, divided into its terms."""

    result: CellResult

    @cached_property
    def segments(self) -> list[Segment]:
        """A segment per term; those above zero follow each other to the right, those below it to the left."""
        segments, above, below = [], 0.0, 0.0
        for column, term in TERMS.items():
            share = getattr(self.result, column) / self.result.latency_s
            below += min(share, 0.0)
            segments.append(Segment(term, share, below if share < 0 else above))
            above += max(share, 0.0)
        return segments

    @property
    def below_zero(self) -> str:
        """Return the negative terms with their shares, as text; empty without any."""
        return ", ".join(segment.words for segment in self.segments if segment.share <= -WORTH_SHOWING)


def breakdown_bars(results: Sequence[CellResult], most_a_phase: int) -> list[BreakdownBar]:
    """Return a bar per measured cell that may have one (`why_no_bar`), at most `most_a_phase`, evenly picked."""
    drawable = [result for result in results if not why_no_bar(result)]
    return [BreakdownBar(result) for result in spanning(drawable, most_a_phase)]


def why_no_bar(result: CellResult) -> str:
    """Return why the terms of a cell's time say nothing, in words that follow its name; empty if they do."""
    if result.noise == "unusable":
        return f"is known only to within {percent(result.time.half_width)}"
    if result.unexplained_s < -result.latency_s:  # the machine changed between the measurements
        return f"has {percent(result.unexplained_s / result.latency_s)} unexplained: its parts took longer"
    return ""


def terms_of(bars: Sequence[BreakdownBar]) -> list[Term]:
    """Return the terms that occur in any of these bars, in the order of TERMS."""
    shown = {segment.term for bar in bars for segment in bar.segments if abs(segment.share) > 0}
    return [term for term in TERMS.values() if term in shown]


def breakdown(run: Run) -> Section | None:
    """A bar per cell, and in documents the terms of the cells of `selected_cells` with half-widths."""
    if not run.measured:
        return None
    note = "from the operators' ceilings, replayed kernels and measured overhead"
    return Section("Where the time goes", [BreakdownChart(run), terms_table(run)], note, folded=True)


_BAR_WIDTH = 48
_BLOCK = "█"
_TITLE = "where the time goes"


@print_block.register
def _(block: BreakdownChart, console: Console) -> None:
    # With four terms a row is wider than 80 columns.
    most_a_phase, most_terms = (2, 4 if console.width > 80 else 3) if block.short else (MOST_BARS_A_PHASE, None)
    cells = of_first_engine(block.run)
    bars = breakdown_bars(cells, most_a_phase)
    if bars and console.color_system and not console.no_color and console.encoding.startswith("utf"):
        legend = Text(f"{_TITLE}: ")
        for number, term in enumerate(terms_of(bars)):
            legend.append(", " if number else "").append(_BLOCK, style=term.screen_color).append(f" {term.short}")
        console.print(legend)
        widest = max(len(bar.result.key.name) for bar in bars)
        for bar in bars:
            console.print(Text(f"{bar.result.key.name:<{widest}} ").append(bar_text(bar)).append(f" {bar.below_zero}"))
    elif bars:
        console.print(rich_table(shares_table(bars, most_terms)))
    without = [f"{cell.key.name} {why}" for cell in cells if (why := why_no_bar(cell))]
    if without:
        line = f"no bar for {several(len(without), 'cell', 'cells')} (first: {without[0]})"
        console.print(UnbrokenText(line, "dim"))


def shares_table(bars: Sequence[BreakdownBar], most_terms: int | None = None) -> TextTable:
    """Return the terms of each cell with their shares, the largest `most_terms` first, and all negative ones."""
    rows = []
    for bar in bars:
        shown = [segment for segment in bar.segments if abs(segment.share) >= WORTH_SHOWING]
        ranked = sorted(shown, key=lambda segment: -abs(segment.share))
        kept = [item for rank, item in enumerate(ranked) if not most_terms or rank < most_terms or item.share < 0]
        rows.append([bar.result.key.name, ", ".join(segment.words for segment in kept)])
    return text_table(("cell", _TITLE), rows, wrapped=(_TITLE,))


def bar_text(bar: BreakdownBar) -> Text:
    """Return a bar of coloured blocks, as many per term as its share of the positive terms; it is always full."""
    whole = max((segment.end for segment in bar.segments if segment.share > 0), default=1.0)
    text = Text()
    for segment in bar.segments:
        if segment.share > 0:
            start, end = (round(_BAR_WIDTH * at / whole) for at in (segment.start, segment.end))
            text.append(_BLOCK * (end - start), style=segment.term.screen_color)
    return text


def terms_table(run: Run) -> TextTable:
    """Return the time breakdown of the cells of `selected_cells`, a row per term with half-widths."""
    evidence, shown = evidence_of(run), selected_cells(run)
    rows = [["measured", *(duration(result.latency_s) for result in shown)]]
    for term, name in TERM_NAMES.items():
        texts = []
        for result in shown:
            widths_s = evidence[result.key].split_half_widths_s if result.key in evidence else {}
            off = f" ± {duration(widths_s[term])}" if widths_s.get(term) else ""
            texts.append(duration(seconds) + off if (seconds := getattr(result, term)) else "")
        if any(getattr(result, term) for result in shown):
            rows.append([name, *texts])
    caption = "each term, with half of its 95 % interval"
    return text_table(["", *(result.key.name for result in shown)], rows, caption=caption, media=HTML)


def inside(run: Run) -> Section:
    """The operators under the ceiling, the module groups of a step, its kernels and gaps."""
    alt = "Operator groups under the measured ceiling; the area of a point is its share of the step"
    pictures = [Picture("operators", alt, (run,))] if group_points(run) else []
    cells = "the smallest and the largest cell of each phase"
    note = f"{cells}; modules timed with hooks, kernels replayed or traced, all in separate passes"
    return Section(
        "Inside a step", [*pictures, module_groups(run), Lines(activity_lines(run))], note, FULL, folded=True
    )


def module_groups(run: Run) -> TextTable:
    """Return a row per step and one per module group in it, for the smallest and the largest cell of each phase."""
    groups: dict[CellKey, list[GroupTime]] = {}
    for item in run.document.breakdown:
        groups.setdefault(item.key, []).append(item)
    rows, starts = list[list[str]](), list[int]()
    for phase in PHASES:
        of_phase = [key for key in groups if key.phase == phase]
        keys = sorted(of_phase, key=lambda key: key.cell.batch_size * key.cell.depth)
        for key in evenly(keys, 2):
            step_s, own_s = groups[key][0].step_s, run.by_key()[key].latency_s
            starts.append(len(rows))
            rows.append([key.name, duration(step_s), f"hooks {100 * (step_s / own_s - 1):+.1f} %", *[""] * 4])
            for item in groups[key]:
                rates = ["-"] * 4
                if item.bytes and item.time_s:
                    per_s = significant(item.flops / item.time_s / 1e12), significant(item.bytes / item.time_s / 1e9)
                    rates = [*per_s, significant(item.flops / item.bytes), percent(item.ceiling_s / item.time_s)]
                name = f"  {item.group.replace('_', ' ')}"
                rows.append([name, duration(item.time_s), percent(item.share), *rates])
    headings = ("inside", "time", "share", "TFLOP/s", "GB/s", "FLOP/byte", "ceiling")
    return text_table(headings, rows, groups=starts)


def activity_lines(run: Run) -> list[str]:
    """Return kernels, gaps and busy share of the traced steps, CUDA commands for nsys and ncu, and unexplained time."""
    document, results = run.document, run.by_key()
    on_cuda = document.device.kind == "cuda"
    what, lines = "kernels" if on_cuda else "operators", []
    for item in document.activity:
        of_median = "" if item.median_s is None else f" of {duration(item.median_s)} in the median"
        lines.append(
            f"{item.key.name}: {item.kernels} {what}{of_median}; one is running {percent(item.busy_share)} of the"
            f" time; {item.gaps} gaps of {duration(item.gap_s / item.gaps) if item.gaps else '0'} on average"
        )
    for item in document.activity:
        kernels = [f"{kernel.name} {duration(kernel.seconds)} in {kernel.calls}" for kernel in item.longest]
        lines += [f"longest in {item.key.name}: {', '.join(kernels)}"] if kernels else []
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
    for judged in document.evidence:
        if judged.unexplained_in_s:
            result, excesses_s = results[judged.key], list(judged.unexplained_in_s.items())[:2]
            most = " and ".join(f"{group.replace('_', ' ')} ({duration(excess_s)})" for group, excess_s in excesses_s)
            lines.append(
                f"{judged.key.name}: {percent(result.unexplained_s / result.latency_s)} of its time is not explained;"
                f" timed with hooks, most of it is in {most}"
            )
    return lines
