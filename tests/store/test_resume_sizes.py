"""An interrupted run of ten thousand cells is resumed within seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from yardstick import yardstick_s

import profiler
from profiler.facts.visits import Gap, Visit
from profiler.grid.cells import Cell
from profiler.measure.sweep import sweep
from profiler.report.progress import QuietListener
from profiler.run import pipeline as run
from profiler.run import setup as foundation
from profiler.run.options import Options
from profiler.run.validate import prepare_resume
from profiler.store.samples import line_of

BATCHES = PROMPTS = range(1, 101)
STEPS = 4


class ReachedError(Exception):
    """Raised after the first new visit, to end the test."""


@pytest.fixture
def interrupted(tiny_folder: Path, brief_roofs: None, tmp_path: Path) -> Path:
    """A real run of one cell, changed into a run of ten thousand cells that was killed after half of them."""
    folder = tmp_path / "run"
    options = {"prompt_lens": [1], "batch_sizes": [1], "new_tokens": STEPS, "budget_s": 0.1, "no_levers": True}
    profiler.profile(str(tiny_folder), out=folder, **options)
    document = json.loads((folder / "run.json").read_text())
    document["grid"] |= {"batch_sizes": [*BATCHES], "prompt_lens": [*PROMPTS]}
    document["finished"] = False
    (folder / "run.json").write_text(json.dumps(document))
    with (folder / "samples.jsonl").open("a") as file:
        file.writelines(line_of(_visit(batch, prompt)) + "\n" for prompt in PROMPTS[:50] for batch in BATCHES)
    return folder


def _visit(batch: int, prompt: int) -> Visit:
    step_s = 1e-3 + 1e-6 * batch * prompt
    cell = Cell(batch, prompt, STEPS)
    return Visit(cell, 0, 2 * step_s, (step_s, 1.1 * step_s, step_s, step_s), 6 * step_s, (), None, 1.7e9)


@pytest.mark.slow
def test_ten_thousand_cells_are_resumed_in_seconds(
    interrupted: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the end of the set-up to the end of the first new visit, a resume takes 16 CPU seconds.

    A run of any size has the set-up. A third of the 16 s rebuilds the lost table of visited cells.
    """
    measure_foundation, dispatch_of = run.measure_foundation, foundation.measure_dispatch
    marks_s = []

    def timed_foundation(*arguments: Any, **named: Any) -> Any:
        result = measure_foundation(*arguments, **named)
        marks_s.append(time.process_time())
        return result

    def until_a_visit(*arguments: Any, **named: Any) -> Iterator[Visit | Gap]:
        first = next(sweep(*arguments, **named))
        marks_s.append(time.process_time())
        assert first.cell == Cell(1, 100, STEPS), "an unvisited corner"
        raise ReachedError
        yield first

    def dispatch_of_one_batch(loaded: Any, config: Any, machine: Any, batches: Any, *rest: Any) -> list[Any]:
        """Measures the dispatch of one batch size and copies it: measuring a hundred is not part of this test."""
        measured = dispatch_of(loaded, config, machine, batches[:1], *rest)
        return [replace(dispatch, batch_size=batch) for dispatch in measured for batch in batches]

    monkeypatch.setattr(run, "measure_foundation", timed_foundation)
    monkeypatch.setattr(foundation, "measure_dispatch", dispatch_of_one_batch)
    prepared = prepare_resume(interrupted, Options(model=str(tiny_folder), budget_s=0.1, no_levers=True))
    with pytest.raises(ReachedError):
        run.execute(prepared, QuietListener(), until_a_visit)
    set_up_s, visit_s = marks_s
    assert visit_s - set_up_s < 1300 * yardstick_s()
