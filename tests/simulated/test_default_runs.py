"""Default runs of Mistral-7B on simulated cards: every row is measured twice, within the budget.

`python -m tests.simulated.test_default_runs` prints their table. Seconds are those of the simulated clock.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from profiler.store.folder import Run, read_gathered, read_run

from .scenario import Scenario, command_line
from .truth import H100, H200, RTX_4090, T4, Truth
from .world import simulated

_BUDGET_S = 60.0
_BEFORE = ("starting", "loading")


@dataclass(frozen=True)
class Default:
    """A default run and the least rows that it measures: a row is the prefill or the decode of a cell."""

    truth: Truth
    quant: str
    rows: int

    @property
    def name(self) -> str:
        return f"{self.truth.name}, {self.quant}"


DEFAULTS = (
    Default(T4, "none", 6),
    Default(T4, "nf4", 12),
    Default(RTX_4090, "none", 12),
    Default(H100, "none", 18),
    Default(H200, "none", 18),
)


def default_run(case: Default, parent: Path) -> Run:
    """Return the run of `roofscope run MODEL` with all layers, and trials."""
    folder = Scenario("mistral-7b-v0.3").folder(parent)
    with simulated(case.truth):
        command_line("run", str(folder), quant=case.quant, out=parent / "run", fresh=True)
    return read_run(parent / "run")


def seconds_by_part(run: Run) -> dict[str, float]:
    """Return the seconds of each part of a run after loading."""
    return {name: seconds for name, seconds in run.document.stage_s.items() if name not in _BEFORE}


@pytest.mark.slow
@pytest.mark.parametrize("case", DEFAULTS, ids=lambda case: case.name)
def test_every_row_is_measured_twice_within_the_budget(case: Default, tmp_path: Path) -> None:
    run = default_run(case, tmp_path)
    assert len(run.measured) == len(run.results) >= case.rows
    assert min(row.repetitions or 0 for row in run.measured) >= 2
    parts = seconds_by_part(run)
    assert sum(parts.values()) <= 1.1 * _BUDGET_S
    assert sum(parts.get(name, 0.0) for name in ("roofs", "dispatch", "replays")) <= 0.3 * _BUDGET_S
    trials = [trial for found in read_gathered(run.folder, run.document).trials.values() for trial in found]
    assert any(trial.line for trial in trials), "it tries changes on the model"


def _line(name: str, run: Run) -> str:
    widths = [(row.latency_high_s - row.latency_low_s) / 2 / row.latency_s for row in run.measured]
    repetitions = sorted({row.repetitions or 0 for row in run.measured})
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in seconds_by_part(run).items())
    grid = run.document.grid
    shape = f"{','.join(map(str, grid.prompt_lens))} x {','.join(map(str, grid.batch_sizes))}"
    return (
        f"| {name} | {shape} | {len(run.measured)} of {len(run.results)} | {repetitions[0]} to {repetitions[-1]} |"
        f" {100 * statistics.median(widths):.1f} % | {parts} | {sum(seconds_by_part(run).values()):.0f} s |"
    )


if __name__ == "__main__":
    for each in DEFAULTS:
        if not sys.argv[1:] or sys.argv[1] in each.name:
            print(_line(each.name, default_run(each, Path(tempfile.mkdtemp()))), flush=True)
