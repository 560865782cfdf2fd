"""The default grid: the largest that is expected to be measured twice within the budget, and the next larger one."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hurry import hurry
from machines import HOST, SimulatedMachine, SimulatedMemory, ceiling
from subjects import subject_of

from profiler import effort
from profiler.errors import RunError
from profiler.facts.ceilings import READ, Ceilings
from profiler.facts.repetitions import Gap, Repetition
from profiler.grid.cells import Cell, Grid, Phase
from profiler.grid.ranges import default_grids, doubling_grids
from profiler.measure.schedule import Schedule
from profiler.measure.subject import Subject
from profiler.measure.sweep import WarmUp, sweep
from profiler.report.progress import Listener
from profiler.run.options import Options
from profiler.run.pipeline import execute, run_precisions
from profiler.run.setup import Pace, choose_grid, measure_pace, steady_pace
from profiler.run.stages import RunBudget
from profiler.run.validate import PreparedRun, prepare, prepare_batch_test, prepare_resume

FAST = Ceilings({"float32": ceiling(1e15), "bfloat16": ceiling(1e16)}, {READ: ceiling(1e15)}, 1, beyond_cache=True)
"""Ceilings so high that only the warm-ups decide."""


@pytest.fixture(scope="module")
def subject(tiny_folder: Path) -> Subject:
    return subject_of(str(tiny_folder))[0]


def pace_of(subject: Subject, prefill_s: float, step_s: float, wider: float, ceilings: Ceilings = FAST) -> Pace:
    """A machine that takes these seconds for 32 tokens and one sequence, and `wider` times as long for four of each."""
    small = WarmUp(Cell(1, 32, 10), prefill_s, step_s, 1.0, 0.0)
    four = WarmUp(Cell(4, 32, 10), wider * prefill_s, wider * step_s, 1.0, 0.0)
    return Pace(subject, ceilings, {"eager": (small, four)})


@pytest.fixture(scope="module")
def prepared() -> PreparedRun:
    """A request whose model can run all default grids; the paces are those of a tiny one."""
    return prepare(Options(model="smollm2-135m", device="cpu"))


def budget(total_s: float) -> RunBudget:
    return RunBudget(HOST, total_s, effort.STANDARD)


def test_every_default_grid_is_smaller_than_the_one_before_it() -> None:
    grids = default_grids(None)
    sizes = [sum(cell.batch_size * cell.depth + cell.decode_steps for cell in grid.cells) for grid in grids]
    assert sizes == sorted(set(sizes), reverse=True)
    assert all(8 <= cell.decode_steps <= 32 for grid in grids for cell in grid.cells)
    assert len(grids[0].keys) == 18


def test_a_batch_test_has_three_doublings_of_a_short_prompt_before_fewer_of_a_long_one() -> None:
    grids = doubling_grids((128, 16), [], None)
    assert all(grid.batch_sizes == tuple(2**power for power in range(len(grid.batch_sizes))) for grid in grids)
    assert grids[0].batch_sizes[-1] == 4096
    shapes = [(grid.prompt_lens[0], grid.batch_sizes[-1]) for grid in grids]
    assert shapes.index((16, 8)) < shapes.index((16, 4)) < shapes.index((16, 2))
    assert (128, 4) not in shapes
    assert {grid.context_lens for grid in doubling_grids([], [64], None)} == {(64,)}


def test_a_slower_machine_has_a_smaller_grid_and_names_the_budget_of_the_next(
    prepared: PreparedRun, subject: Subject
) -> None:
    """Two repetitions of the chosen grid take less than half of 60 s; the budget that is named measures the next
    grid."""
    places = []
    for seconds in (1e-4, 1e-2, 3e-2, 0.1, 0.3, 1.0, 10.0):
        pace = pace_of(subject, seconds, seconds / 2, 2.0)
        chosen, larger = choose_grid(prepared, pace, budget(60.0))
        places.append(prepared.ladder.index(chosen))
        assert (larger is None) == (chosen == prepared.ladder[0])
        if chosen != prepared.ladder[-1]:
            assert Schedule(pace.plan(chosen)).whole_grid_s < 30.0
        if larger is not None and larger.budget_s is not None:
            more, _ = choose_grid(prepared, pace, budget(larger.budget_s))
            assert (more.prompt_lens, more.batch_sizes) == (larger.prompt_lens, larger.batch_sizes)
    assert places == sorted(places)
    assert len(set(places)) > 3
    assert places[-1] == len(prepared.ladder) - 1


def test_a_steps_time_is_at_least_its_rooflines(prepared: PreparedRun, subject: Subject) -> None:
    """A GPU's smallest cells take the host's time, and one warm-up has no slope: only the roofline shows the rest."""
    slow = Ceilings({"float32": ceiling(1e6), "bfloat16": ceiling(1e6)}, {READ: ceiling(1e15)}, 1, beyond_cache=True)
    key = prepared.grid.keys[-1]
    on_cpu, pace = pace_of(subject, 1e-4, 1e-4, 1.0), pace_of(subject, 1e-4, 1e-4, 1.0, slow)
    assert on_cpu.expected_s(key) == pytest.approx(1e-4, rel=0.01)
    one_point = replace(pace, warm_ups={"eager": pace.warm_ups["eager"][:1]})
    assert one_point.expected_s(key) > 1e-3
    gpu: Any = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    assert replace(pace, subject=replace(pace.subject, machine=gpu)).expected_s(key) > 1e-3
    assert pace.expected_s(key) == on_cpu.expected_s(key)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_batch_test_ends_two_doublings_past_the_knee(tiny_folder: Path, subject: Subject, phase: Phase) -> None:
    """Without a cache, a float32 step reads 4 bytes for two FLOPs per weight: with 30 per byte, the knee is at 60."""
    ceilings = Ceilings({"float32": ceiling(30e12)}, {READ: ceiling(1e12)}, 1, beyond_cache=True)
    options = Options(model=str(tiny_folder), new_tokens=4, dtype="float32", device="cpu", budget_s=1e9)
    prepared = prepare_batch_test(options, phase, context_len=1 if phase == "decode" else None, prompt_len=1)
    pace = replace(pace_of(subject, 1e-9, 1e-9, 1.0), ceilings=ceilings)
    sizes = choose_grid(prepared, pace, budget(1e9))[0].batch_sizes
    assert 60 < sizes[-1] <= 256


@pytest.mark.parametrize("seconds", [2e-2, 4e-2, 8e-2])
@pytest.mark.parametrize("first", [1.0, 2.0])
def test_the_choice_holds_next_to_a_neighbour_and_follows_a_faster_or_slower_machine(  # type: ignore[no-untyped-def]
    first: float, seconds: float, prepared: PreparedRun, subject: Subject, tmp_path: Path, monkeypatch
) -> None:
    """On two cores one busy process makes steps up to twice as long; the first run is next to it or at rest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def raw(factor: float) -> Pace:
        return pace_of(subject, factor * seconds, factor * seconds / 2, 2.0)

    def chosen(factor: float, **options: Any) -> Grid:
        request = replace(prepared, options=replace(prepared.options, **options))
        return choose_grid(request, steady_pace(request, raw(factor)), budget(60.0))[0]

    at_rest, beside_it = (choose_grid(prepared, raw(factor), budget(60.0))[0] for factor in (1.0, 2.0))
    assert at_rest != beside_it, "the neighbour alone would change the choice"
    assert {chosen(factor) for factor in (first, 1.0, 1.5, 2.0, 1.2, 1.0)} == {chosen(first)}
    fresh = {factor: chosen(factor, fresh=True) for factor in (0.01, 1.0, 100.0)}
    assert len(set(fresh.values())) == 3
    for factor, grid in fresh.items():
        assert chosen(factor) == grid


def test_what_does_not_fit_into_memory_is_not_chosen(prepared: PreparedRun, subject: Subject) -> None:
    machine = SimulatedMachine(SimulatedMemory(lambda _: 1e9), available_bytes=8 << 20)
    pace = pace_of(replace(subject, machine=machine), 1e-9, 1e-9, 1.0)
    chosen, larger = choose_grid(prepared, pace, budget(60.0))
    assert chosen != prepared.ladder[0]
    assert larger is not None
    assert larger.budget_s is None


def test_warm_ups_are_those_of_the_smallest_cell_and_of_more_sequences(prepared: PreparedRun, subject: Subject) -> None:
    [small, wider] = measure_pace(prepared, subject, FAST, budget(60.0)).warm_ups["eager"]
    assert small.cell == prepared.ladder[-1].cells[0]
    assert wider.cell.batch_size > small.cell.batch_size
    assert all(item.prefill_s and 0 < item.decode_s < item.prefill_s * 100 for item in (small, wider))


def only_the_first(*given: Any, **named: Any) -> Iterator[Repetition | Gap]:
    """A sweep that ends after one repetition, as on a machine that has become much slower."""
    yield next(sweep(*given, **named))


@pytest.mark.slow
def test_a_cell_that_the_budget_did_not_reach_has_its_reason_and_resume_measures_it(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, whole_grid=False)
    options = Options(model=str(tiny_folder), prompt_lens="8", batch_sizes="1,2", new_tokens=4, device="cpu")
    options = replace(options, budget_s=600.0, no_trials=True, out=tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("profiler.run.pipeline.sweep", only_the_first)
        run = execute(prepare(options), Listener())
    assert run.cells["status"].tolist() == ["ok", "skipped"] * 2
    assert any("the budget of 600 s ended before its repetition" in warning for warning in run.document.warnings)
    for model, words in ((None, "give its path again"), ("gpt2", "it profiled tiny-llama")):
        with pytest.raises(RunError, match=words):
            prepare_resume(run.folder, replace(options, model=model))
    again = execute(prepare_resume(run.folder, options), Listener())
    assert again.cells["status"].tolist() == ["ok"] * 4
    with pytest.raises(RunError, match="is finished"):
        prepare_resume(run.folder, options)


@pytest.mark.slow
def test_a_cell_of_a_default_grid_that_the_budget_did_not_reach_is_no_row_and_resume_measures_it(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, whole_grid=False)
    options = Options(model=str(tiny_folder), device="cpu", budget_s=600.0, no_trials=True, out=tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("profiler.run.pipeline.sweep", only_the_first)
        run = execute(prepare(options), Listener())
    unreached = run.document.grid.unreached
    assert run.cells["status"].tolist() == ["ok"] * 2
    assert len(unreached) == len(run.document.grid.prompt_lens) * len(run.document.grid.batch_sizes) - 1
    assert not run.document.failed
    again = execute(prepare_resume(run.folder, options), Listener())
    assert again.cells["status"].tolist() == ["ok"] * 2 * (1 + len(unreached))


@pytest.mark.slow
def test_precisions_share_the_grid_of_the_slowest(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second model is a thousand times slower, as planted in its warm-ups."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hurry(monkeypatch, whole_grid=False)
    options = Options(model=str(tiny_folder), device="cpu", no_trials=True, out=tmp_path / "runs", budget_s=20.0)
    slow, ladder = measure_pace, prepare(options).ladder

    def planted(prepared: PreparedRun, *given: Any) -> Pace:
        pace = slow(prepared, *given)
        factor = 1e3 if prepared.request.quant == "int8wo" else 1e-3
        [items] = pace.warm_ups.values()
        slower = (replace(item, prefill_s=item.prefill_s * factor, decode_s=item.decode_s * factor) for item in items)
        return replace(pace, warm_ups={"eager": tuple(slower)})

    monkeypatch.setattr("profiler.run.setup.measure_pace", planted)
    runs = run_precisions(options, ["none", "int8wo"], Listener())
    grids = [run.document.grid for run in runs]
    assert grids[0].prompt_lens == grids[1].prompt_lens == ladder[-1].prompt_lens
    assert {run.document.engine.budget_s for run in runs} == {20.0}


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("neighbours", [0, 1])
def test_the_same_machine_chooses_the_same_grid_ten_times(  # type: ignore[no-untyped-def]
    neighbours: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = {"prompt_lens": None, "batch_sizes": None, "new_tokens": None}
    subject, _ = subject_of("smollm2-135m", weights="random", **options)
    prepared = prepare(Options(model="smollm2-135m", weights="random", device="cpu"))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(neighbours)]
    try:
        paces = (measure_pace(prepared, subject, FAST, budget(60.0)) for _ in range(10))
        chosen = {choose_grid(prepared, steady_pace(prepared, pace), budget(60.0))[0] for pace in paces}
    finally:
        for process in busy:
            process.kill()
    assert len(chosen) == 1
