"""Two runs that measured different grids: the common cells are compared, and a command measures the others."""

from __future__ import annotations

import pytest
from sides import key_of, side, timed

from profiler.comparison.compare import compare_sides
from profiler.comparison.gate import gate
from profiler.comparison.gate_formats import gate_github, gate_section
from profiler.comparison.side import Side
from profiler.comparison.text import comparison_sentences, measuring
from profiler.report.blocks import Lines

LARGE = " --prompt-lens 64,256 --batch-sizes 1 --new-tokens 32"
SMALL = " --prompt-lens 64 --batch-sizes 1 --new-tokens 8"


def measured(grid: str, *lengths: int, settings: str = "") -> Side:
    """A default run, whose command names its `grid`, and its decodes after `lengths` prompt tokens."""
    command = f"roofscope run m{grid} --dtype float32 --device cpu --budget 60{settings}"
    return side({key_of(prompt_len=length): timed(0.01) for length in lengths}, command=command)


def repeated(grid: str, settings: str = "") -> str:
    return f"`roofscope run m --dtype float32 --device cpu{settings}{grid}`"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        # The grid is the other run's, all else is the run's own; a named grid without a budget is measured whole.
        (
            measured(LARGE, 64, 256),
            measured(SMALL, 64, settings=" --no-trials"),
            f"1 cell is only in the first; to measure the second on the other grid: {repeated(LARGE, ' --no-trials')}.",
        ),
        (
            measured(SMALL, 64),
            measured(LARGE, 64, 256),
            f"1 cell is only in the second; to measure the first on the other grid: {repeated(LARGE)}.",
        ),
        # A cell of the same grid that had no number.
        (measured(LARGE, 64, 256), measured(LARGE, 64), "1 cell is only in the first."),
        # Another tool's file has no command.
        (measured(LARGE, 64, 256), side({key_of(prompt_len=64): timed(0.01)}), "1 cell is only in the first."),
    ],
)
def test_the_cells_of_one_side_are_counted_with_what_measures_them(before: Side, after: Side, said: str) -> None:
    comparison = compare_sides(before, after)
    assert comparison_sentences(comparison)[:2] == ["Of 1 common cell, 1 is the same.", said]
    verdict = gate(comparison, {"decode": 0.03})
    alone = gate(compare_sides(measured(SMALL, 64), measured(SMALL, 64)), {"decode": 0.03})
    assert (verdict.outcome, verdict.cells) == (alone.outcome, alone.cells)
    assert next(block.lines[0] for block in gate_section(verdict).blocks if isinstance(block, Lines)) == said
    assert f"::notice title=roofscope gate::{said}" in gate_github(verdict)


@pytest.mark.parametrize(
    "grid",
    [
        " --context-lens 4096 --batch-sizes 1,16 --new-tokens 32",
        " --prompts 'my prompts.txt' --prompt-lens 2,5 --batch-sizes 1 --new-tokens 8",
        """ --prompts 'what'"'"'s new.txt' --prompt-lens 2 --batch-sizes 1 --new-tokens 8""",
        " --prompt-lens ragged:32..512 --batch-sizes 4 --new-tokens 16",
    ],
)
def test_every_grid_can_be_taken_over_and_left(grid: str) -> None:
    other = measured(LARGE, 64)
    assert measuring("second", other, measured(grid)) == f"; to measure the second on the other grid: {repeated(grid)}"
    assert measuring("first", measured(grid), other) == f"; to measure the first on the other grid: {repeated(LARGE)}"
