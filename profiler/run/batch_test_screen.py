"""The screen of `batch-test`: its conclusions, then a row per batch size."""

from __future__ import annotations

from profiler.grid.cells import Phase
from profiler.judge.scaling import DoublingTest
from profiler.report.blocks import Lines, Section, Sentences
from profiler.report.cells import doubling_table
from profiler.report.overview import end_lines, roofs_lines
from profiler.store.folder import Run

_TOO_FEW = "Fewer than two batch sizes have a number: there is nothing to compare."


def doubling_sections(run: Run, phase: Phase) -> list[Section]:
    """Return a run's batch-doubling tests of one phase, with its warnings and its folder."""
    tests = [test for test in run.document.scaling if test.axis == "batch" and test.fixed["phase"] == phase]
    sections = [_series(run, test) for test in tests] or [Section("", [Sentences([_TOO_FEW])])]
    late = sorted({item.batch_size for item in run.results if item.phase == phase and item.status == "forecast"})
    ends = [f"No time was left for batch {', '.join(map(str, late))}: a larger --budget reaches them."] if late else []
    end = [Lines([*ends, *run.document.warnings], "warning"), Lines(end_lines(run), "dim")]
    return [*sections, Section("", end)]


def _series(run: Run, test: DoublingTest) -> Section:
    fixed, model = test.fixed, run.model
    depth = f"{fixed['prompt_len']} prompt tokens" if fixed["prompt_len"] else f"context {fixed['context_len']}"
    setting = [
        f"{model.id}, {model.dtype}, {fixed['phase']} with the engine {fixed['engine']}, {depth}",
        "measured roofs: " + ", ".join(roofs_lines(run)),
    ]
    return Section("", [Sentences(test.sentences), Lines(setting), doubling_table(run, test)])
