"""Default runs of Mistral-7B on simulated cards, whose budget is in simulated seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.store.folder import read_gathered, read_run

from .scenario import Scenario, command_line
from .truth import H100, H200, RTX_4090, T4, Truth
from .world import simulated

_BUDGET_S = 60.0
_BESIDE = {"ceilings", "overhead", "replays"}
_OLD = {"roofs": "ceilings", "dispatch": "overhead"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "quant", "rows"),
    [(T4, "none", 6), (T4, "nf4", 12), (RTX_4090, "none", 12), (H100, "none", 18), (H200, "none", 18)],
)
def test_every_row_is_measured_twice_within_the_budget(truth: Truth, quant: str, rows: int, tmp_path: Path) -> None:
    """The run of `roofscope run MODEL` with all layers, and trials; a row is the prefill or the decode of a cell."""
    folder = Scenario("mistral-7b-v0.3").folder(tmp_path)
    with simulated(truth):
        command_line("run", str(folder), quant=quant, out=tmp_path / "run", fresh=True)
    run = read_run(tmp_path / "run")
    assert len(run.measured) == len(run.results) >= rows
    assert min(row.repetitions or 0 for row in run.measured) >= 2
    stages = run.document.stage_s.items()
    parts = {_OLD.get(name, name): seconds for name, seconds in stages if name not in ("starting", "loading")}
    assert parts.keys() >= _BESIDE
    assert sum(parts.values()) <= 1.1 * _BUDGET_S
    assert sum(parts[name] for name in _BESIDE) <= 0.3 * _BUDGET_S
    trials = [trial for found in read_gathered(run.folder, run.document).trials.values() for trial in found]
    assert any(trial.line for trial in trials), "it tries changes on the model"
