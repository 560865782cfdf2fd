"""The batch-doubling test as a section: its conclusions, then a row per batch size."""

from __future__ import annotations

from rich.console import Console

from profiler.grid.cells import Phase
from profiler.judge.cells import CellResult
from profiler.judge.scaling import Doubling, DoublingTest
from profiler.report.blocks import Lines, Section, Sentences, TextTable, text_table
from profiler.report.overview import end_lines, roofs_lines
from profiler.report.selection import MOST_SIZES, evenly
from profiler.report.terminal import print_sections
from profiler.store.folder import Run
from profiler.units import duration, significant

DOUBLING_COLUMNS = ("batch", "time", "tok/s", "gain", "slope", "interval", "by bytes", "by FLOPs", "evidence for")
_TOO_FEW = "Fewer than two batch sizes have a number: there is nothing to compare."


def print_doubling(run: Run, phase: Phase, console: Console) -> None:
    """Print a run's batch-doubling tests of one phase, with its warnings and its folder."""
    tests = [test for test in run.document.scaling if test.axis == "batch" and test.fixed["phase"] == phase]
    sections = [_series(run, test) for test in tests] or [Section("", [Sentences([_TOO_FEW])])]
    end = [Lines(run.document.warnings, "warning"), Lines(end_lines(run), "dim")]
    print_sections([*sections, Section("", end)], console)


def _series(run: Run, test: DoublingTest) -> Section:
    fixed, model = test.fixed, run.model
    depth = f"{fixed['prompt_len']} prompt tokens" if fixed["prompt_len"] else f"context {fixed['context_len']}"
    setting = [
        f"{model.id}, {model.dtype}, {fixed['phase']} with the engine {fixed['engine']}, {depth}",
        "measured roofs: " + ", ".join(roofs_lines(run)),
    ]
    return Section("", [Sentences(test.sentences), Lines(setting), doubling_table(run, test)])


def doubling_table(run: Run, test: DoublingTest) -> TextTable:
    """Return a row per batch size, with the slope from the size before it.

    Of more than `MOST_SIZES` doublings, evenly picked ones are shown, from the first to the last.
    """
    by_batch = {result.batch_size: result for result in run.measured if test.holds(result)}
    steps = evenly(test.doublings, MOST_SIZES)
    rows = [[*_size(by_batch[test.doublings[0].smaller]), *[""] * 6]]
    rows += [[*_size(by_batch[step.larger]), *_slope(step)] for step in steps]
    omitted = len(test.doublings) - len(steps)
    caption = "slope: 0 if a larger batch takes no longer, 1 if time grows with it; by bytes, by FLOPs: as counted"
    caption += f"; {omitted} more sizes are in run.json" if omitted else ""
    return text_table(DOUBLING_COLUMNS, rows, texts=("evidence for",), caption=caption)


def _size(result: CellResult) -> list[str]:
    return [str(result.batch_size), duration(result.latency_s), significant(result.tokens_per_s)]


def _slope(step: Doubling) -> list[str]:
    """Return gain, slope, interval, the slopes that bytes and FLOPs predict, and the bound that the slope supports."""
    return [
        f"{step.gain:.2f}x",
        f"{step.slope:.2f}",
        f"{step.low:.2f} .. {step.high:.2f}",
        f"{step.bytes_slope:.2f}",
        f"{step.flops_slope:.2f}",
        step.side,
    ]
