"""Forecasts on GPUs of known truth: of left-out cells, and of cells that a budget does not reach."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
from hurry import with_effort

from profiler.forecast.command import run_facts
from profiler.store.folder import Run, read_run

from .scenario import Scenario, command_line, said, so
from .truth import A100, T4
from .world import simulated

pytestmark = pytest.mark.slow


def test_a_run_forecasts_a_card_of_known_truth(tmp_path: Path) -> None:
    """Forecasts of two layers of Mistral-7B have median errors below 5 %: of each cell from the others, and of the
    extremes from the rest."""
    run, _ = said(Scenario("mistral-7b-v0.1", 2, prompt_lens=[128, 512], batch_sizes=[1, 8]), [A100], tmp_path)
    known = run_facts(run.folder)
    assert known.trained.within.median < 0.05
    assert known.trained.outside.median < 0.05


SCENARIO = Scenario("mistral-7b-v0.3", 8, prompt_lens=[64, 128, 256, 512], batch_sizes=[1, 2, 4, 8, 16], new_tokens=16)
CORNERS = {(1, 64), (1, 512), (16, 64), (16, 512)}
BUDGET_S = 20.0


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Run, float]:
    """(exit code, run, simulated seconds without loading) of a run of the scenario in a short time."""
    folder = tmp_path_factory.mktemp("short")
    model, out = str(SCENARIO.folder(folder)), folder / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        with_effort(patch, whole_grid=False, more_prefills_s=0.8, warm_up_s=1.0)
        with simulated(T4) as world:
            start_s = world.host.now_s
            code = command_line("run", model, **SCENARIO.options(), fresh=True, out=out, budget=BUDGET_S)
            took_s = world.host.now_s - start_s
    run = read_run(out)
    return code, run, took_s - run.document.stage_s["loading"]


@pytest.mark.ci
def test_it_ends_with_its_budget_and_has_the_corners_twice(short: tuple[int, Run, float]) -> None:
    code, run, took_s = short
    assert code == 0
    assert took_s < 1.2 * BUDGET_S
    assert took_s > 0.4 * BUDGET_S
    twice = {(row.batch_size, row.prompt_len) for row in run.measured if (row.visits or 0) >= 2}
    assert twice >= CORNERS
    assert {row.status for row in run.results} == {"ok", "forecast"}
    rows = {row.key: row for row in run.results if row.status == "forecast"}
    assert all(row.regime is None and row.visits is None and math.isnan(row.floor_s) for row in rows.values())
    assert not {item.key for item in (*run.document.evidence, *run.document.breakdown)} & set(rows), "no evidence"


def test_the_forecast_times_are_those_that_the_cells_take(short: tuple[int, Run, float], tmp_path: Path) -> None:
    """The true times come from plain calls on a separate card."""
    _, run, _ = short
    truth_s = {
        (phase.phase, phase.batch_size, phase.prompt_len): phase.latency_s for phase in so(SCENARIO, T4, tmp_path)
    }
    rows = [row for row in run.results if row.status == "forecast"]
    assert len(rows) >= 8
    true_s = [truth_s[row.phase, row.batch_size, row.prompt_len] for row in rows]
    off = [abs(row.latency_s / true - 1) for row, true in zip(rows, true_s, strict=True)]
    inside = [row.latency_low_s <= true <= row.latency_high_s for row, true in zip(rows, true_s, strict=True)]
    assert statistics.median(off) < 0.10
    assert sum(inside) >= 0.8 * len(rows)
